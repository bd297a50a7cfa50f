"""Slurm's own output lines become states, and last states become verdicts."""

from __future__ import annotations

import pytest

from paceline.machines.slurm import states
from paceline.machines.slurm.states import JobState, merged, verdict_of

SQUEUE = """\
8|PENDING|(null)|BeginTime
7|PENDING||PartitionNodeLimit
12|RUNNING|node-[001-002]|None
10|NODE_FAIL|node-[001-002]|NodeDown
21_2|CANCELLED||Dependency
torn
"""
SACCT = """\
1|COMPLETED|0:0|node-[001-004]|None
2|FAILED|7:0|node-001|NonZeroExitCode
3|FAILED|0:9|node-001|RaisedSignal:9(Killed)
4|CANCELLED by 0|0:0|node-[001-002]|None
5|TIMEOUT|0:0|node-003|TimeLimit
6|OUT_OF_MEMORY|0:125|node-001|OutOfMemory
9|RUNNING|0:0|None assigned|None
"""
SINFO = """\
node-001|idle|none
node-002|down*|Not responding
node-003|drained|bad cable
node-004|idle*|none
node-005|allocated|none
"""
SRUN = """\
srun: error: Node failure on node-002
srun: error: Node failure on gpu-7.site
srun: Job step aborted: Waiting up to 5 seconds for job step to finish.
"""


def test_the_queue_tells_state_nodes_and_reason() -> None:
    jobs = states.parse_squeue(SQUEUE)
    assert list(jobs) == ["8", "7", "12", "10", "21_2"]
    assert jobs["12"] == JobState("12", "RUNNING", "node-[001-002]")
    assert jobs["12"].phase == "job 12 is running on node-[001-002]"
    assert jobs["8"].phase == "job 8 waits in Slurm's queue: BeginTime"
    assert not jobs["8"].never_starts and jobs["7"].never_starts
    assert jobs["10"].ended and not jobs["12"].ended


def test_accounting_tells_codes_signals_and_who_cancelled() -> None:
    jobs = states.parse_sacct(SACCT)
    assert [jobs[job].exit_code for job in "1235"] == [0, 7, 137, 0]
    assert (jobs["4"].state, jobs["4"].cancelled_by, jobs["2"].cancelled_by) == (
        "CANCELLED",
        0,
        None,
    )
    assert jobs["9"].nodes == ""


def test_accounting_counts_once_it_knows_of_the_end() -> None:
    queue, account = states.parse_squeue(SQUEUE), states.parse_sacct(SACCT)
    ended = JobState("2", "FAILED", "node-001", "NonZeroExitCode")
    assert merged(ended, account["2"]) == account["2"]
    assert merged(ended, None) == ended and merged(None, account["2"]) == account["2"]
    late = JobState("9", "COMPLETED", "node-001")
    assert merged(late, account["9"]) == late
    assert merged(queue["12"], account["5"]) == queue["12"]
    assert merged(None, None) is None


@pytest.mark.parametrize(
    ("last", "status", "words"),
    [
        (
            JobState("5", "TIMEOUT", "n1"),
            "timeout",
            "Slurm job 5 was ended by Slurm at its time limit",
        ),
        (JobState("5", "DEADLINE", "n1"), "timeout", "deadline"),
        (JobState("5", "OUT_OF_MEMORY", "n1"), "oom", "ran out of memory"),
        (JobState("5", "PREEMPTED", "n1"), "incomplete", "preempted"),
        (JobState("5", "BOOT_FAIL", "n[1-2]"), "failed", "did not boot of n[1-2]"),
        (JobState("5", "NODE_FAIL", "n[1-2]"), "failed", "lost a node of n[1-2]"),
        (JobState("5", "CANCELLED", cancelled_by=0), "cancelled", "cancelled by root (user id 0)"),
        (
            JobState("5", "CANCELLED", cancelled_by=4_000_000),
            "cancelled",
            "cancelled by user id 4000000",
        ),
        (JobState("5", "CANCELLED"), "cancelled", "cancelled by another user"),
        (
            JobState("5", "CANCELLED", reason="Dependency"),
            "cancelled",
            "waited for a job that failed",
        ),
        (JobState("5", "PENDING", reason="DependencyNeverSatisfied"), "failed", "can never start"),
        (JobState("5", "FAILED", "n[1-2]", "JobLaunchFailure"), "failed", "could not be started"),
    ],
)
def test_last_states_say_why_a_run_ended(last: JobState, status: str, words: str) -> None:
    verdict = verdict_of(last)
    assert verdict and (verdict.status, words in verdict.reason) == (status, True)


def test_what_the_ranks_must_tell_is_left_to_them() -> None:
    assert verdict_of(JobState("5", "COMPLETED", "n1")) is None
    assert verdict_of(JobState("5", "FAILED", "n1", "NonZeroExitCode")) is None


def test_lost_nodes_are_named_as_hosts_at_fault() -> None:
    verdict = verdict_of(JobState("5", "NODE_FAIL", "node-[001-002]"), ("node-002",))
    assert verdict and verdict.hosts == ("node-002",) and "lost a node: node-002" in verdict.reason
    launch = verdict_of(JobState("5", "FAILED", "n[1-2]", "JobLaunchFailure"))
    assert launch and launch.hosts == ("n1", "n2")


def test_nodes_are_lost_or_unusable_by_what_sinfo_says() -> None:
    assert states.lost_nodes(SINFO) == {"node-002": "down*, Not responding", "node-004": "idle*"}
    assert list(states.unusable_nodes(SINFO)) == ["node-002", "node-003", "node-004"]
    assert states.unusable_nodes(SINFO)["node-003"] == "drained, bad cable"
    assert states.failed_nodes(SRUN) == ["gpu-7.site", "node-002"]
    both = "srun: error: Node failure on node-[003-004]."
    assert states.failed_nodes(both) == ["node-003", "node-004"]


def test_nodes_kept_for_maintenance_are_those_of_whoever_has_reserved_them() -> None:
    sinfo = "node-001|maint|none\nnode-002|drained|bad cable"
    assert list(states.unusable_nodes(sinfo)) == ["node-001", "node-002"]
    assert list(states.unusable_nodes(sinfo, reserved=True)) == ["node-002"]


def test_a_list_that_cannot_be_read_names_nobody() -> None:
    assert states.host_names("node-[001-") == ()
    assert states.host_names("a[1-2],b") == ("a1", "a2", "b")
