"""What srun prints tells a step that somebody cancelled from one whose rank failed."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.machines.slurm import steps
from paceline.machines.slurm.steps import StepRun, cancellation

FAILED = """\
srun: error: node-002: task 1: Exited with exit code 3
srun: launch/slurm: _step_signal: Terminating StepId=9.2
slurmstepd-node-001: error: *** STEP 9.2 ON node-001 CANCELLED AT 2026-11-21T11:37:34 ***
srun: error: node-001: task 0: Exited with exit code 143
"""
CANCELLED = """\
slurmstepd-node-001: error: *** STEP 9.3 ON node-001 CANCELLED AT 2026-11-21T11:37:42 ***
srun: error: node-001: task 0: Killed
srun: Force Terminated StepId=9.3
"""
LIMIT = """\
slurmstepd: error: *** STEP 9.4 ON node-001 CANCELLED AT 2026-11-21T11:37:42 DUE TO TIME LIMIT ***
srun: error: node-001: task 0: Terminated
"""


@pytest.mark.parametrize(
    ("log", "counts", "limit"),
    [(FAILED, False, False), (CANCELLED, True, False), (LIMIT, True, True), ("", False, False)],
)
def test_only_what_nobody_failed_before_counts_as_cancelled(
    log: str, counts: bool, limit: bool
) -> None:
    match = cancellation(log)
    assert (match is not None) == counts
    assert bool(match and match[1]) == limit


def test_a_time_limit_begins_with_the_step_not_while_it_waits_for_nodes_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now_s = [1000.0]
    monkeypatch.setattr(
        steps, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=time.sleep)
    )
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        run = StepRun(process, None, None, folder=tmp_path, allocation="7", limit_s=60)
        now_s[0] += 61
        assert run.waiting and not run.timed_out and run.phase == "waits for nodes of allocation 7"
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "host-a.log").touch()
        assert not run.waiting and not run.timed_out and "runs" in run.phase
        now_s[0] += 61
        assert run.timed_out
        run.stop()
