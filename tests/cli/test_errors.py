"""What a user sees when something is wrong: one line, the exit code, nothing on stdout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import __version__
from tests.command import paceline


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "tiny-lama"], 1, "did you mean 'tiny-llama'"),
        (["run", "tiny-llama", "--set", "stpes=3"], 1, "did you mean 'steps'"),
        (["run", "tiny-llama", "--set", "model.num_heads=3"], 1, "=3: model: hidden_size 256 is"),
        (["run", "tiny-gpt", "--variant", "x"], 1, "this recipe has none"),
        (
            ["run", "tiny-llama", "--device", "tpu"],
            1,
            "--device: 'tpu' is not one of 'auto', 'cpu', 'cuda'",
        ),
        (["run", "tiny-llama", "--device", "cuda"], 1, "no visible NVIDIA GPU"),
        (["run", "/no/such/file.yaml"], 1, "yaml: cannot be read: No such file or directory\n"),
        (["probe", "profile", "tiny-llama", "--from", "x"], 1, "RECIPE|RUN: has no effect with"),
        (
            ["probe", "profile"],
            1,
            "paceline probe profile: needs an input; allowed: one of RECIPE,",
        ),
        (["probe", "profile", ""], 1, "error: RECIPE|RUN '': is not a recipe, and"),
        (["run", "llama31-70b", "--device", "cpu"], 1, "cannot fit"),
        (["run", "tiny-llama", "--devices", "0"], 1, "0 is too small; allowed: 1 or"),
        (["run", "tiny-llama", "--devices", "two"], 1, "'two' is not a whole number;"),
        (["run"], 1, "RECIPE: is missing; `paceline run --help`"),
        (
            ["run", "tiny-llama", "--no-such-option"],
            1,
            "--no-such-option: is not an option of paceline run",
        ),
        (["no-such-verb"], 1, "paceline no-such-verb: is not a command"),
        (["recipes", "devices", "H10"], 1, "did you mean 'H100'"),
        (["estimate", "tiny-lama"], 1, "did you mean 'tiny-llama'"),
        (["estimate", "tiny-llama", "--set", "lr=x", "--device", "H100"], 1, "'x' is not a number"),
        (["estimate", "tiny-llama", "--device", "H100"], 1, "needs --gpus; allowed: a number"),
        (["tune", "tiny-lama"], 1, "did you mean 'tiny-llama'"),
        (["tune", "tiny-llama", "--set", "lr=x"], 1, "'x' is not a number; allowed: a number"),
        (["tune", "tiny-llama"], 1, "paceline tune: needs --budget; allowed: "),
        (["tune", "tiny-llama", "--estimate-only"], 1, "needs --device; allowed: a name listed"),
        (["tune", "tiny-llama", "--budget", "1m"], 1, "needs --gpus; allowed: a number of devices"),
        (["runs", "show", "nothing"], 1, "contains no runs"),
        (["runs", "list", "--where", "status"], 1, "is not column=value"),
        (
            ["runs", "list", "--where", "status=zzz", "--where", "foo=1"],
            1,
            "foo=1: is not a column",
        ),
        (["recipes", "devices", "--where", "vendor=ADM"], 1, "matches none of"),
        (["recipes", "devices", "--where", "vendor=ADM"], 1, "allowed: NVIDIA, AMD"),
        (["recipes", "devices", "H100", "--where", "vendor=AMD"], 1, "not of 'H100'"),
        (
            ["recipes", "devices", "--links", "single node", "--where", "foo=1"],
            1,
            "is not a column",
        ),
        (["recipes", "tiny-llama", "--where", "dtype=bf16"], 1, "not of 'tiny-llama'"),
        (["runs", "report", "--json", "--output", "-"], 1, "name a file"),
        (["runs", "report", "last"], 1, "contains no runs"),
        (["probe", "gemm", "--dtype", "fp12"], 1, "is not a list of data types"),
        (["probe", "context", "--device", "cuda"], 1, "no visible NVIDIA GPU"),
        (["probe", "context", "--device", "tpu"], 1, "not one of 'auto', 'cpu', 'cuda'"),
        (["probe", "context", "--ranks", "0"], 1, "--ranks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_clear_error(tmp_path: Path, arguments: list[str], code: int, words: str):
    done = paceline(*arguments, runs=tmp_path)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["parse", ""], "PATHS"),
        (["scale", "--from="], "--from"),
        (["recipes", "stage", "tiny-llama", "--to", ""], "--to"),
    ],
)
def test_an_empty_path_is_not_the_working_folder(tmp_path: Path, words: list[str], name: str):
    done = paceline(*words, cwd=tmp_path)
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr == (
        f"error: {name}: is empty; allowed: a path, `.` for this folder; check whether a shell "
        "variable is unset\n"
    )


def test_this_folder_is_not_empty_beside_another_empty_word(tmp_path: Path):
    for words in (["--set=total_tokens="], ["--tag", ""]):
        done = paceline("run", "tiny-llama", "--dry-run", "--runs-dir", ".", *words, cwd=tmp_path)
        assert "is empty; allowed: a path" not in done.stderr


def test_a_recipe_that_is_no_text_is_told_so(tmp_path: Path):
    (path := tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe")
    done = paceline("run", path, runs=tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"error: {path}: is not UTF-8 text; save it as UTF-8\n"


def test_a_place_that_cannot_be_written_is_a_system_fault(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = paceline("run", "tiny-llama", "--no-probe", "--runs-dir", str(blocked), runs=tmp_path)
    assert done.returncode == 2 and "run folder cannot be created" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["runs", "list"], ["runs", "show", "last"], ["runs", "index"]]
)
def test_a_runs_folder_that_is_a_file_is_the_users_error(tmp_path: Path, arguments: list[str]):
    (tmp_path / "file").write_text("")
    done = paceline(*arguments, "--runs-dir", str(tmp_path / "file"), runs=tmp_path)
    assert done.returncode == 1 and "is not a folder" in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    "verb", ["run", "recipes", "recipes devices", "runs list", "runs show", "runs report"]
)
def test_help_teaches_with_an_example(verb: str):
    text = paceline(*verb.split(), "--help").stdout
    assert "Usage" in text and "xample" in text


def test_help_without_arguments_lists_the_verbs():
    text = paceline("--help").stdout
    assert all(
        f"│ {verb} " in text for verb in ("run", "recipes", "runs", "table", "probe", "estimate")
    )


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_printed_by_the_usual_option(option: str):
    lines = paceline(option).stdout.splitlines()
    assert lines[0] == f"paceline {__version__}"
    assert [line.split()[0] for line in lines[1:]] == ["python", "torch"]


def test_completion_can_be_shown():
    done = paceline("--show-completion", "bash")
    assert "complete" in done.stdout.lower()


@pytest.mark.parametrize(
    "words",
    [
        ["recipes", "devices"],
        ["recipes", "--format", "json"],
        ["--version"],
        ["--help"],
        ["runs", "list", "-h"],
    ],
)
def test_a_reader_that_stops_early_ends_a_verb_quietly(words: list[str]):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_under_standard_output_is_a_system_fault():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "recipes", "devices"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert "No space left" in done.stderr and "Traceback" not in done.stderr
