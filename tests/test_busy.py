"""Tests run next to busy loops that end with them."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests.busy import busy_loops, main

NOTED = "import sys; open(sys.argv[1], 'a').write('x'); sys.exit(int(sys.argv[2]))"


@pytest.mark.parametrize(("code", "rounds"), [(0, 2), (3, 1)])
def test_a_command_is_repeated_until_it_fails(tmp_path: Path, code: int, rounds: int) -> None:
    file = tmp_path / "noted"
    assert main(1, 2, [sys.executable, "-c", NOTED, str(file), str(code)]) == code
    assert file.read_text() == "x" * rounds


def test_the_loops_are_busy_and_end_whatever_happens() -> None:
    with pytest.raises(RuntimeError), busy_loops(2) as loops:
        assert all(psutil.Process(pid).is_running() for pid in loops)
        raise RuntimeError
    assert not any(map(psutil.pid_exists, loops))
