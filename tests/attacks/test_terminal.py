"""Names that others chose, on the user's terminal: none of them moves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from tests.attacks.reproductions import (
    ESCAPES,
    assert_clean,
    recipe_with,
    refused,
    stored_run,
)
from tests.command import paceline

WRITTEN = r'"\e]0;owned\a\e[31m\x9b31m\u202ered"'
"""The same as YAML escapes."""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{WRITTEN}: 1", "foreign.yaml"),
        (f"name: {WRITTEN}", "foreign.yaml"),
        (f"engine: {WRITTEN}", "is unknown; `paceline recipes engines` lists them"),
    ],
)
def test_a_recipe_cannot_write_to_the_terminal(tmp_path: Path, line: str, words: str):
    recipe = recipe_with(tmp_path / "foreign.yaml", "name:", line)
    done = paceline("run", recipe, "--dry-run", runs=tmp_path)
    refused(done, words=words)
    assert_clean(done)


def test_a_title_of_a_recipe_cannot_either(tmp_path: Path):
    recipe = recipe_with(tmp_path / "foreign.yaml", "title:", f"title: {WRITTEN}")
    for words in (["recipes", recipe], ["run", recipe, "--dry-run"]):
        assert_clean(paceline(*words, runs=tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        ["runs", "list"],
        ["runs", "list", "--format", "md"],
        ["runs", "list", "--format", "csv"],
        ["runs", "show", "ours"],
    ],
)
def test_a_record_cannot_write_to_the_terminal(tmp_path: Path, words: list[str]):
    stored_run(tmp_path, "ours", group=ESCAPES, tag=ESCAPES, reason=ESCAPES, warnings=[ESCAPES])
    done = paceline(*words, runs=tmp_path)
    assert done.returncode == 0 and "ours" in done.stdout, done.stderr
    assert_clean(done)


def test_a_record_that_is_refused_cannot_either(tmp_path: Path):
    stored_run(tmp_path, "ours", status=ESCAPES)
    for words in (["runs", "list"], ["runs", "show", "ours"]):
        assert_clean(paceline(*words, runs=tmp_path))


def test_a_log_of_any_name_is_read_and_its_name_shown_clean(tmp_path: Path):
    log = tmp_path / f"{ESCAPES}.log"
    log.write_text("nothing that a training prints\n")
    for words in (["parse", log], ["parse", tmp_path / f"missing{ESCAPES}.log"]):
        done = paceline(*words, runs=tmp_path)
        assert_clean(done)


def test_what_other_programs_say_passes_the_same_door(capsys: pytest.CaptureFixture[str]):
    echo(f"error: {UserError('host h1', f'ssh: {ESCAPES}')}", err=True)
    printed = capsys.readouterr().err
    assert "ssh: " in printed and printed.rstrip("\n").isprintable()
