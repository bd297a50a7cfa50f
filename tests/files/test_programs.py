"""Programs that end while something they started still holds their pipes."""

from __future__ import annotations

import time

import pytest

from paceline.files import programs
from paceline.files.programs import run_program

LEAVES = "echo before >&2; (sleep 0.5; echo after >&2; exec sleep {seconds}) & exit 3"


def test_what_a_command_leaves_is_heard_after_its_end():
    done = run_program(("bash", "-c", LEAVES.format(seconds=0)), lambda: None)
    assert (done.returncode, done.stderr.split()) == (3, ["before", "after"])


def test_what_a_command_leaves_is_killed_in_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(programs, "MAX_AFTER_END_S", 2.0)
    began = time.monotonic()
    done = run_program(("bash", "-c", LEAVES.format(seconds=600)), lambda: None)
    assert (done.returncode, done.stderr.split()) == (3, ["before", "after"])
    assert time.monotonic() - began < 300
