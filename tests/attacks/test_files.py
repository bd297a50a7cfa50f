"""Files that others made: bombs, pipes, devices, links, depths, and folders that cannot be held."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from tests.attacks.reproductions import recipe_with, refused, stored_run
from tests.command import paceline

DEEP = "[" * 100_000
SHORT_S = 60
"""Of what a bomb or an endless file would keep busy for minutes, or for ever."""
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize("verb", ["recipe", "cluster"])
def test_aliases_that_make_a_document_huge_are_refused_at_once(tmp_path: Path, verb: str):
    (tmp_path / "bomb.yaml").write_text(BOMB)
    words = ["run", tmp_path / "bomb.yaml", "--dry-run"]
    if verb == "cluster":
        words = ["run", "tiny-llama", "--dry-run", "--cluster", tmp_path / "bomb.yaml"]
    begin = time.monotonic()

    refused(paceline(*words, runs=tmp_path), 1, "expands to 100,000 values")

    assert time.monotonic() - begin < SHORT_S


def test_a_recipe_of_endless_depth_is_refused(tmp_path: Path):
    (tmp_path / "deep.yaml").write_text("name: " + DEEP)
    refused(
        paceline("run", tmp_path / "deep.yaml", "--dry-run", runs=tmp_path),
        1,
        "nested brackets",
    )


def test_lists_of_endless_depth_are_refused(tmp_path: Path):
    (tmp_path / "deep.yaml").write_text("name: x\nlist:\n" + "- " * 20_000 + "x\n")
    refused(paceline("run", tmp_path / "deep.yaml", "--dry-run", runs=tmp_path), 1, "deep.yaml")


@pytest.mark.parametrize(
    "words", [["runs", "show", "last"], ["runs", "report", "last"], ["compare", "a", "b"]]
)
def test_a_record_of_endless_depth_is_one_clear_error(tmp_path: Path, words: list[str]):
    for name in ("a", "b"):
        (stored_run(tmp_path, name) / "run.json").write_text('{"name": ' + DEEP)
    done = paceline(*words, runs=tmp_path)
    assert done.returncode in (1, 2) and done.stderr.startswith("error: "), done.stderr
    assert "run.json" in done.stderr and "Traceback" not in done.stderr


def test_an_inventory_of_endless_depth_loses_only_itself(tmp_path: Path):
    (stored_run(tmp_path) / "inventory.json").write_text('{"cpu": ' + DEEP)
    done = paceline("runs", "show", "last", "--json", runs=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["step_time_s"]["value"] > 0


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
@pytest.mark.parametrize("words", [["runs", "show", "last"], ["runs", "list"]])
def test_a_step_file_that_is_no_file_is_not_read(tmp_path: Path, kind: str, words: list[str]):
    path = stored_run(tmp_path, ended_unix=None) / "steps" / "rank-00000.jsonl"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    begin = time.monotonic()

    done = paceline(*words, runs=tmp_path)

    assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr
    assert time.monotonic() - begin < SHORT_S


def test_a_report_follows_a_link_and_leaves_it(tmp_path: Path):
    stored_run(tmp_path / "runs")
    (tmp_path / "target.html").write_text("old")
    (tmp_path / "link.html").symlink_to("target.html")

    done = paceline(
        "runs", "report", "last", "--output", tmp_path / "link.html", runs=tmp_path / "runs"
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "link.html").is_symlink()
    assert "<html" in (tmp_path / "target.html").read_text()


def test_a_report_into_a_device_leaves_the_device(tmp_path: Path):
    stored_run(tmp_path / "runs")
    (tmp_path / "null").symlink_to(os.devnull)

    done = paceline("runs", "report", "last", "--output", tmp_path / "null", runs=tmp_path / "runs")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "null").is_symlink()
    assert stat.S_ISCHR((tmp_path / "null").stat().st_mode)


@pytest.mark.parametrize(
    ("version", "remedy"), [(3, "update Paceline"), (1, "open it with the Paceline that wrote it")]
)
def test_a_folder_of_another_version_is_refused_by_name(version: int, remedy: str, tmp_path: Path):
    stored_run(tmp_path, "other", schema_version=version)
    stored_run(tmp_path, "ours")

    refused(
        paceline("runs", "show", "other", runs=tmp_path),
        1,
        f"has schema {version}, but this version",
    )

    listed = paceline("runs", "list", runs=tmp_path)
    assert listed.returncode == 0 and remedy in listed.stderr
    assert "ours" in listed.stdout and "other" not in listed.stdout


def test_one_folder_that_no_index_can_hold_hides_no_other(tmp_path: Path):
    stored_run(tmp_path, "ours")
    huge = stored_run(tmp_path, "huge")
    record = json.loads((huge / "run.json").read_text())
    record["spec"]["cluster"]["nodes"] = 10**20
    (huge / "run.json").write_text(json.dumps(record))
    unknown = stored_run(tmp_path, "unknown")
    record["spec"]["cluster"]["nodes"], record["spec"]["flops_convention"] = 1, "none"
    (unknown / "run.json").write_text(json.dumps(record))
    (unknown / "result.json").unlink()

    for words in (["runs", "list"], ["runs", "index"], ["runs", "list"]):
        done = paceline(*words, runs=tmp_path)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        assert "left out: " in done.stderr and "huge" in done.stderr
        assert words != ["runs", "list"] or "ours" in done.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('name: "a\\0b"', "printable characters"),
        ('name: "\\ud800"', "printable characters"),
        (f"name: {'x' * 5000}", "1 to 100 printable characters"),
    ],
)
def test_a_recipe_whose_name_no_script_can_hold_is_refused(tmp_path: Path, line: str, words: str):
    recipe = recipe_with(tmp_path / "named.yaml", "name:", line)
    refused(paceline("run", recipe, "--dry-run", runs=tmp_path), 1, words)


def test_a_tag_that_no_folder_can_hold_is_the_users_to_shorten(tmp_path: Path):
    done = paceline("run", "tiny-llama", "--no-probe", "--tag", "x" * 5000, runs=tmp_path)
    assert done.returncode == 1 and "shorter --tag" in done.stderr
    assert "--runs-dir" not in done.stderr and not list(tmp_path.glob("*xxx*"))


def test_names_that_are_no_text_are_refused_before_anything_is_made(tmp_path: Path):
    name = os.fsdecode(b"\xff")
    runs = tmp_path / "runs"
    refused(paceline("run", "tiny-llama", "--tag", name, runs=runs), 1, "--tag: \\udcff is not")
    refused(paceline("runs", "list", "--runs-dir", tmp_path / name, runs=runs), 1, "is not UTF-8")
    assert not list(tmp_path.glob("*/20*")) and not (tmp_path / name).exists()
