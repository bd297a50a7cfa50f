"""The real program: command, capture, import, export and reading of a process on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.job import Job
from paceline.profiles.nsys import tool
from paceline.profiles.nsys.tool import NsysSettings, nsys_program, nsys_words, output_pattern
from paceline.profiles.tools import wrap_ranks

WAITS, WAIT_MS = 7, 20
PROGRAM = f"""
import os, select, sys, time
poll = select.poll()
for _ in range({WAITS}):
    poll.poll({WAIT_MS})
time.sleep(0.3)
sys.stdout.flush()
os._exit(3)
"""
"""As the trainer ends: without what a normal exit does. Of calls right before it, half are lost."""


@pytest.fixture
def program() -> Path:
    """nsys; where it is required (PACELINE_REQUIRE), a missing nsys fails the test."""
    path = nsys_program()
    if path is None:
        required = "profiling" in os.environ.get("PACELINE_REQUIRE", "").split(",")
        (pytest.fail if required else pytest.skip)("no nsys here: make deps-profiling")
    return path


def test_what_a_chosen_rank_waits_for_is_told(tmp_path: Path, program: Path) -> None:
    words = nsys_words("cpu", output_pattern("wait", "fp32", 2), NsysSettings())
    words[0] = str(program)
    job = wrap_ranks(Job("wait", sys.executable, ("wait.py",)), (1,), before=words)
    for name, text in {**job.files, "wait.py": PROGRAM}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for rank in (0, 1):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        done = subprocess.run(
            [sys.executable, *job.program], cwd=tmp_path, env=os.environ | place,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 3, done.stderr

    profile = tool.read(tmp_path)

    assert profile.ranks == (1,) and len(profile.files) == 1
    assert profile.files[0].startswith("profiles/wait-fp32_2g_local_0_1.")
    poll = next(hot for hot in profile.kernels if hot.name == "poll")
    # One call or two are lost all the same.
    assert WAITS - 2 <= poll.n <= WAITS and poll.seconds >= poll.n * WAIT_MS * 1e-3
    # Read again, the exported file is enough.
    assert tool.read(tmp_path).kernels == profile.kernels
