"""A test that fails leaves no process behind, and one that passes keeps its own in hand."""

from __future__ import annotations

import subprocess

import pytest

from tests.processes import ended_on_failure

SLEEP = ["sleep", "60"]


def test_what_a_failure_leaves_running_is_ended_and_its_pipes_are_closed() -> None:
    with pytest.raises(AssertionError), ended_on_failure():
        process = subprocess.Popen(SLEEP, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        raise AssertionError
    assert process.stdin and process.stdout
    assert (process.returncode, process.stdin.closed, process.stdout.closed) == (-9, True, True)


def test_without_a_failure_nothing_is_ended() -> None:
    with ended_on_failure():
        process = subprocess.Popen(SLEEP)
    assert process.poll() is None
    process.kill()
    process.wait()
