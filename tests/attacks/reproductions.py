"""What the reproductions of attacks have in common."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

from tests.attacks.fields import CHANGED, RUNS

ESCAPES = "\x1b]0;owned\x07\x1b[31m\x9b31m\u202ered"
"""Sequences that rename a window, change colours, in one byte too, and turn the reading order."""


def refused(done: subprocess.CompletedProcess[str], code: int = 1, words: str = "") -> None:
    """Assert that a verb ended with one clear line and its exit code."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert words in done.stderr, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert done.stdout == ""


def assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    """Assert that nothing printed can move a terminal."""
    for character in "\x1b\x07\x9b\u202e\x00":
        assert character not in done.stdout and character not in done.stderr, repr(character)
    assert "Traceback" not in done.stderr


def stored_run(root: Path, name: str = CHANGED, **fields: Any) -> Path:
    """A copy of a recorded run under `root`, with other fields in its run.json."""
    folder = root / name
    shutil.copytree(RUNS / CHANGED, folder)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, **fields}))
    return folder


def recipe_with(path: Path, old: str, new: str) -> Path:
    """tiny-llama as a file in which the line that begins with `old` is `new`."""
    text = (resources.files("paceline.files") / "recipes" / "tiny-llama.yaml").read_text()
    lines = [new if line.startswith(old) else line for line in text.splitlines()]
    assert new in lines
    path.write_text("\n".join(lines) + "\n")
    return path
