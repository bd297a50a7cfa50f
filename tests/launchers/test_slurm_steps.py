"""What srun prints tells a step that somebody cancelled from one whose rank failed."""

from __future__ import annotations

import pytest

from paceline.launchers.slurm_steps import cancelled

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
    ("log", "found", "limit"),
    [(FAILED, False, False), (CANCELLED, True, False), (LIMIT, True, True), ("", False, False)],
)
def test_only_what_nobody_failed_before_counts_as_cancelled(
    log: str, found: bool, limit: bool
) -> None:
    told = cancelled(log)
    assert (told is not None) == found
    assert bool(told and told[1]) == limit
