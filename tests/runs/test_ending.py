"""How a run ended is read from what is left: the rank at fault before those that noticed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.files.events import RankLog, read_rank
from paceline.machines import JobEnd
from paceline.runs.ending import (
    EndEvidence,
    find_ending,
    launcher_exits,
    log_tail,
    read_evidence,
    stacks,
)
from tests.files.test_events import END, START, STEP, lines

LOST = "another rank ended first: RuntimeError: Connection closed by peer"
WAITED = "no progress for 5 s in step 3: waiting for other ranks"
ALONE = "no progress for 5 s in step 3: not inside a collective"
STOPPED = {"silent_s": 5.0, "doing": "in step 3"}
CAUSES: dict[str | None, dict[str, Any]] = {
    LOST: {"cause": "peer_lost"},
    WAITED: {"cause": "waiting", **STOPPED},
    ALONE: {"cause": "no_progress", **STOPPED},
}


def rank(status: str | None = "ok", reason: str | None = None, at: float = 0.0) -> RankLog:
    """A rank that ended `at` seconds into the end; without a status it was cut off."""
    end = {**END, "status": status, "reason": reason, "time_unix": END["time_unix"] + at}
    if status != "ok":
        end |= CAUSES.get(reason, {"cause": "own_fault"})
    return read_rank(lines(START, STEP, *([end] if status else [])))


def job(*ranks: RankLog, code: int = 1, **evidence: Any) -> EndEvidence:
    return EndEvidence(dict(enumerate(ranks)), len(ranks), code, **evidence)


def outcome(evidence: EndEvidence) -> tuple[str, str | None]:
    ending = find_ending(evidence)
    return ending.status, ending.reason


@pytest.mark.parametrize("reason", [LOST, WAITED, ALONE, "ValueError: bad", None])
def test_an_end_line_from_before_causes_has_that_of_its_reason(reason: str | None):
    old = read_rank(lines({**END, "status": "failed", "reason": reason}))
    assert old.end is not None and old.end == rank("failed", reason).end


def test_a_cause_counts_and_the_words_of_its_reason_do_not():
    end = {**END, "status": "failed", "cause": "own_fault"}
    ranks = [read_rank(lines({**end, "reason": reason})) for reason in (LOST, WAITED)]
    assert outcome(job(*ranks)) == ("failed", f"rank 0: {LOST}")


def test_all_ranks_ok_is_ok():
    assert outcome(job(rank(), rank(), code=0)) == ("ok", None)


def test_a_crash_after_the_last_step_is_ok_with_a_warning():
    ending = find_ending(job(rank(), rank(), code=-6))
    assert ending.status == "ok" and "-6" in ending.warnings[0]


@pytest.mark.parametrize("status", ["oom", "nan", "failed"])
def test_one_ranks_trouble_is_the_runs_and_it_is_named(status: str):
    assert outcome(job(rank(), rank(status, "because"))) == (status, "rank 1: because")
    assert find_ending(job(rank(), rank(status, "because"))).rank == 1


def test_a_single_rank_needs_no_name():
    assert outcome(job(rank("failed", "because"))) == ("failed", "because")


def test_what_all_ranks_say_is_said_once():
    assert outcome(job(rank("nan", "because"), rank("nan", "because"))) == ("nan", "because")


def test_the_first_of_several_failures_is_the_cause():
    late, early = rank("oom", "no memory", at=2.0), rank("failed", "ValueError: bad", at=1.0)
    assert outcome(job(late, early)) == ("failed", "rank 1: ValueError: bad")


def test_of_failures_at_the_same_time_the_gravest_is_the_cause():
    ranks = rank("failed", "something unknown"), rank("oom", "no memory")
    assert outcome(job(*ranks)) == ("oom", "rank 1: no memory")


def test_a_lost_peer_is_never_the_cause():
    ranks = rank("failed", LOST, at=1.0), rank("oom", "no memory", at=2.0)
    assert outcome(job(*ranks)) == ("oom", "rank 1: no memory")


def test_with_nothing_else_a_lost_peer_is_better_than_silence():
    assert outcome(job(rank("failed", LOST), rank(None))) == ("failed", LOST)


def test_a_rank_killed_by_a_signal_is_named_before_the_peer_that_noticed():
    evidence = job(rank("failed", LOST), rank(None), exits={0: 1, 1: -9})
    assert outcome(evidence) == ("failed", "rank 1 was killed by SIGKILL")


def test_what_a_killed_rank_printed_last_is_added():
    evidence = job(
        rank(None), rank(None), exits={1: -6, 0: -15}, tails={1: ["Error: no such device"]}
    )
    assert outcome(evidence) == ("failed", "rank 1 was killed by SIGABRT: Error: no such device")


def test_the_launchers_own_signal_is_no_cause():
    evidence = job(rank(None), rank("failed", "ValueError: bad"), exits={1: 1, 0: -15})
    assert outcome(evidence) == ("failed", "rank 1: ValueError: bad")


def test_a_kill_with_the_kernels_count_is_out_of_memory():
    evidence = job(rank("failed", LOST), rank(None), exits={1: -9}, oom_killed=True)
    assert outcome(evidence) == (
        "oom",
        "the kernel killed rank 1 because the machine ran out of memory",
    )


def test_the_kernels_count_alone_suffices_when_a_rank_is_missing():
    assert outcome(job(rank(), rank(None), oom_killed=True))[0] == "oom"
    assert outcome(job(rank(), rank(), code=0, oom_killed=True))[0] == "ok"


def test_a_cpp_program_out_of_memory_aborts_and_says_so_only_in_its_log():
    tails = {1: ["terminate called after throwing an instance of 'std::bad_alloc'"]}
    evidence = job(rank("failed", LOST), rank(None), exits={1: -6}, tails=tails)
    assert outcome(evidence) == ("oom", "rank 1: std::bad_alloc in C++ code")


def test_the_rank_outside_a_collective_is_the_one_that_hangs():
    ranks = rank("failed", WAITED, at=0.0), rank("failed", ALONE, at=1.0), rank("failed", WAITED)
    assert outcome(job(*ranks)) == ("failed", f"rank 1: {ALONE}")
    assert find_ending(job(*ranks)).rank == 1


def test_a_rank_that_gave_no_sign_is_the_one_that_hangs():
    """It was stopped; that the launcher killed it in the end is not the cause."""
    status, reason = outcome(job(rank("failed", WAITED), rank(None), exits={0: 1, 1: -9}))
    assert status == "failed" and reason is not None
    assert reason.startswith("rank 1 showed no activity while rank 0 waited (no progress for 5 s")


def test_many_silent_ranks_are_not_all_listed():
    _, reason = outcome(job(rank("failed", WAITED), *[rank(None)] * 20))
    assert reason is not None and "ranks 1, 2, 3, 4, 5, 6, 7, 8, ... showed" in reason


def test_a_rank_whose_watchdog_could_not_run_is_the_one_that_hangs():
    evidence = job(rank("failed", WAITED), rank(None), rank(None), hung_ranks=frozenset({2}))
    _, reason = outcome(evidence)
    assert reason is not None
    assert reason.startswith("rank 2: no progress for 5 s in step 3: its watchdog could not run")


def test_ranks_that_all_wait_are_out_of_step():
    _, reason = outcome(job(rank("failed", WAITED), rank("failed", WAITED)))
    assert reason == "no progress for 5 s in step 3: every rank waits for others"


def test_a_rank_that_left_without_a_word_is_named():
    evidence = job(rank("failed", LOST), rank(None), exits={1: 7}, tails={1: ["fatal error: x"]})
    assert outcome(evidence) == ("failed", "rank 1: ended with exit code 7: fatal error: x")


def test_a_silent_death_takes_its_reason_from_the_log():
    assert outcome(job(rank(None), tail=["step 1", "ValueError: no such thing"])) == (
        "failed",
        "ValueError: no such thing",
    )


def test_a_missing_rank_is_not_ok():
    assert outcome(job(rank(), rank(None), code=0))[0] == "failed"


LAUNCHER = """
Failures:
[1]:
  time      : 2026-11-21_08:09:06
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 10283)
  error_file: <N/A>
--------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_08:09:06
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -6 (pid: 10284)  (SIGABRT)
"""


def test_the_launchers_report_is_read_root_cause_first():
    assert list(launcher_exits(LAUNCHER).items()) == [(1, -6), (0, 1)]
    assert launcher_exits("all is well") == {}


def folder_with(tmp_path: Path, **logs: str) -> Path:
    (tmp_path / "logs").mkdir()
    for name, text in logs.items():
        stem, _, suffix = name.rpartition("_")
        (tmp_path / "logs" / f"{stem.replace('_', '-')}.{suffix}").write_bytes(text.encode())
    return tmp_path


def test_the_tail_prefers_the_rank_that_failed(tmp_path: Path):
    folder = folder_with(
        tmp_path,
        rank_00000_log="all well\n",
        rank_00001_log="RuntimeError: broken\n",
        launcher_log="ChildFailedError:\n",
    )
    assert log_tail(folder) == ["RuntimeError: broken"]
    assert log_tail(folder, 0) == ["all well"]


def test_the_launchers_words_on_the_signal_that_was_asked_for_are_no_news(tmp_path: Path):
    torchrun = (
        "W1128 00:33:00.847000 25596 torch/distributed/elastic/agent/server/api.py:753] "
        "Received 15 death signal, shutting down workers\n"
        "W1128 00:33:00.848000 25596 torch/distributed/elastic/multiprocessing/api.py:1028] "
        "Sending process 25601 closing signal SIGTERM\n"
        "Traceback (most recent call last):\n"
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 25596 got signal: "
        "15\n"
    )
    folder = folder_with(tmp_path, rank_00000_log="slow link\n", launcher_log=torchrun)
    assert log_tail(folder, on_request=True) == ["slow link"]
    assert len(log_tail(folder)) == 3


def test_what_slurms_script_said_counts_where_nothing_was_started(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "slurm-8.log").write_text("error: node-1 has no address on ib0\n")
    ending = find_ending(read_evidence(tmp_path, 2, 1, oom_killed=False))
    assert ending.reason == "error: node-1 has no address on ib0"
    (tmp_path / "logs" / "launcher.log").write_text(
        "srun: error: task 0: Exited with exit code 1\n"
    )
    assert log_tail(tmp_path) == ["srun: error: task 0: Exited with exit code 1"]


def test_the_agent_of_a_host_counts_where_no_rank_printed(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "host-0001.log").write_text("OSError: no space left\n")
    assert log_tail(tmp_path) == ["OSError: no space left"]


def test_a_long_reason_ends_at_a_whole_word(tmp_path: Path):
    line = "ValueError: " + "word " * 100
    folder = folder_with(tmp_path, rank_00000_log=f"{line}\n")
    reason = find_ending(read_evidence(folder, 1, 1, oom_killed=False)).reason
    assert reason is not None and reason.endswith(" word ...") and len(reason) <= 304


def test_stacks_are_those_that_say_something(tmp_path: Path):
    folder = folder_with(
        tmp_path,
        rank_00000_stack="",
        rank_00001_timer="Timeout (0:00:05)!\n",
        rank_00002_stack="here",
        rank_00002_timer="cut off",
        rank_00003_timer="",
    )
    assert stacks(folder) == {
        "logs/rank-00001.timer": "Timeout (0:00:05)!\n",
        "logs/rank-00002.stack": "here",
    }
    assert read_evidence(folder, 3, 1, False).hung_ranks == {1, 2}


def test_a_folder_without_anything_is_evidence_of_a_failure(tmp_path: Path):
    ending = find_ending(read_evidence(tmp_path, 2, 3, False))
    assert (ending.status, ending.reason) == ("failed", "the launcher ended with code 3")


def test_a_lost_host_is_the_cause_before_the_ranks_that_noticed():
    gone = JobEnd("failed", "node-2: the connection was lost", ("node-2",))
    evidence = job(rank("failed", LOST), rank(None), job_end=gone)
    assert outcome(evidence) == ("failed", "node-2: the connection was lost")
    evidence = job(rank("failed", "because"), rank(None), job_end=gone)
    assert outcome(evidence)[1] == "rank 0: because"


def test_a_job_that_the_batch_system_ended_has_its_status():
    limit = JobEnd("timeout", "Slurm: TIMEOUT")
    assert outcome(job(rank(None), rank(None), job_end=limit)) == ("timeout", "Slurm: TIMEOUT")


def test_exits_of_many_nodes_are_read_from_their_own_logs(tmp_path: Path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "host-b.log").write_text("@exit rank=1 code=-9 at=10.0\n")
    (logs / "host-a.log").write_text("@exit rank=0 code=1 at=11.0\n")
    evidence = read_evidence(tmp_path, 2, 1, False)
    assert list(evidence.exits.items()) == [(1, -9), (0, 1)]
    assert outcome(evidence) == ("failed", "rank 1 was killed by SIGKILL")


def test_a_wait_of_unknown_length_is_told_without_it():
    waiting = {**END, "status": "failed", "reason": None, "cause": "waiting"}
    ranks = [read_rank(lines(START, STEP, waiting))] * 2
    assert outcome(job(*ranks)) == ("failed", "no progress: every rank waits for others")
