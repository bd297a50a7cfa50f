"""What surrounds a command is broken: streams, encodings, folders and names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = f"{sys.executable} -m paceline"
LIMIT_S = 120


def shell(
    line: str, tmp_path: Path, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which `$paceline` is the command; runs are in tmp_path/runs."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PACELINE_RUNS": str(tmp_path / "runs"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "NO_COLOR": "1",
        "paceline": COMMAND,
        **variables,
    }
    return subprocess.run(
        ["bash", "-c", line],
        cwd=cwd or tmp_path,
        env=environment,
        capture_output=True,
        timeout=LIMIT_S,
    )


def assert_error(done: subprocess.CompletedProcess[bytes], code: int, words: str) -> None:
    """One line that says `words`, and the exit code."""
    text = done.stderr.decode("utf-8")
    assert done.returncode == code, text
    assert text.startswith("error: ") and text.count("\n") == 1 and words in text
    assert done.stdout == b""


@pytest.mark.parametrize("verb", ["runs list", "recipes", "recipes devices H100 --json"])
def test_a_closed_output_is_a_system_fault(tmp_path: Path, verb: str):
    assert_error(shell(f"$paceline {verb} >&-", tmp_path), 2, "standard output: is closed")


def test_nothing_can_be_said_with_all_streams_closed(tmp_path: Path):
    assert shell("$paceline runs list <&- >&- 2>&-", tmp_path).returncode == 2


def test_a_closed_error_stream_changes_no_answer(tmp_path: Path):
    done = shell("$paceline recipes 2>&-", tmp_path)
    assert done.returncode == 0 and b"tiny-gpt" in done.stdout


def test_a_closed_input_is_an_empty_one(tmp_path: Path):
    closed, empty = (shell(f"$paceline parse - {end}", tmp_path) for end in ("<&-", "</dev/null"))
    assert closed.returncode == empty.returncode and closed.stderr == empty.stderr == b""
    assert closed.stdout == empty.stdout and b"empty: the file is empty" in closed.stdout


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_narrow_encoding_gets_escapes_for_what_it_lacks(tmp_path: Path, encoding: str):
    (tmp_path / "log.txt").write_text(LOG)
    facts = "--model tiny-gpt --seq-len 256 --device H100 --gpus 8"
    stored = f"$paceline runs import log.txt {facts} --runs-dir '\u6a21\u578b-\u20ac'"
    for line in (stored, "$paceline runs show '\u6a21\u578b-\u20ac'/*"):
        done = shell(line, tmp_path, PYTHONIOENCODING=encoding)
        assert done.returncode == 0 and done.stderr == b""
        assert b"tokens/s" in done.stdout and rb"\u6a21\u578b-\u20ac" in done.stdout


def test_runs_of_nobody_are_refused(tmp_path: Path):
    done = shell("$paceline runs list", tmp_path, PACELINE_RUNS="~nouser/x")
    assert_error(done, 1, "~nouser/x: refers to a user without a home")


@pytest.mark.parametrize("verb", ["runs list", "run tiny-gpt --dry-run", "recipes"])
def test_a_deleted_working_folder_is_said(tmp_path: Path, verb: str):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = shell(f'rmdir "$PWD" && $paceline {verb}', tmp_path, cwd=gone)
    assert_error(done, 1, "working folder: no longer exists")


@pytest.mark.parametrize("verb", ["run tiny-gpt --no-probe", "runs import log.txt"])
@pytest.mark.parametrize("option", ["--tag $'a\\xff'", "--runs-dir $'r\\xff'"])
def test_names_that_are_no_text_are_refused_before_anything_is_made(
    tmp_path: Path, verb: str, option: str
):
    (tmp_path / "log.txt").write_text(LOG)
    before = sorted(tmp_path.iterdir())
    assert_error(shell(f"$paceline {verb} {option}", tmp_path), 1, "\\udcff is not UTF-8")
    assert sorted(tmp_path.iterdir()) == before


LOG = "".join(
    f" [2026-01-01 00:00:{number:02d}] iteration {number:8d}/     100 | consumed samples: "
    f"{number * 16:12d} | elapsed time per iteration (ms): {1000 + number % 3}.0 | "
    "learning rate: 1.0E-04 | global batch size:    16 | lm loss: 5.0E+00 |\n"
    for number in range(1, 41)
)
