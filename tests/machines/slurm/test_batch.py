"""What a queued run makes of Slurm's words, of job.sh's and of silence; what its folder keeps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.machines import slurm
from paceline.machines.slurm import batch
from paceline.machines.slurm.batch import BatchRun
from paceline.machines.slurm.client import Queue
from paceline.machines.slurm.record import (
    JobMarkers,
    SlurmJournal,
    orphan_job,
    read_markers,
    read_slurm_record,
)
from paceline.machines.slurm.states import JobState
from tests.machines.slurm.fake_slurm import put
from tests.machines.slurm.test_script import make_job
from tests.waiting import wait_until

CONFIG = "echo 'AccountingStorageType = accounting_storage/none'"


class Told(Queue):
    """A queue that says what the test wants."""

    says: JobState | None = None

    def state(self, job: str, urgent: bool = False) -> JobState | None:
        return self.says


def make_run(folder: Path, **site: object) -> tuple[BatchRun, Told]:
    queue = Told()
    (folder / "logs").mkdir(parents=True)
    (folder / "steps").mkdir()
    return BatchRun(make_job(**site), folder, "5", queue=queue), queue


def mark(folder: Path, *lines: str) -> None:
    with (folder / "slurm.status").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


@pytest.fixture(autouse=True)
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return put(
        tmp_path,
        monkeypatch,
        scontrol=CONFIG,
        scancel="true",
        sinfo="echo 'b|down*|none'",
        sbatch="echo 6",
        squeue="true",
        sacct="true",
    )


def test_an_unknown_job_is_unknown_for_a_while_and_then_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(tmp_path / "run")
    assert run.poll() is None
    monkeypatch.setattr(batch, "UNKNOWN_LIMIT_S", -1.0)
    assert run.poll() == 1
    verdict = run.verdict()
    assert verdict and "no longer knows job 5" in verdict.reason and not run.restart()


@pytest.mark.parametrize(("marks", "code"), [("end 5 0 7", 7), ("", 1)])
def test_a_job_that_slurm_has_forgotten_while_it_ran_ends_by_its_own_word_or_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marks: str, code: int
) -> None:
    put(tmp_path, monkeypatch, squeue="echo '5|RUNNING|a|None'")
    run, _ = make_run(tmp_path / "run")
    run.queue = Queue(max_interval_s=0.05)
    assert run.poll() is None
    mark(tmp_path / "run", "start 5 0 a", marks)
    put(tmp_path, monkeypatch, squeue="echo 'Invalid job id specified' >&2; exit 1")
    time.sleep(1.0)
    assert run.poll() is None
    monkeypatch.setattr(batch, "UNKNOWN_LIMIT_S", 0.0)
    assert run.poll() == code
    lost = run.verdict()
    assert (lost is None) == bool(marks) and not run.restart()
    assert lost is None or "no longer knows job 5" in lost.reason


def test_a_silent_slurm_is_told_and_the_jobs_own_word_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, queue = make_run(tmp_path / "run")
    queue.says, queue.silent_since = JobState("5", "RUNNING", "a"), time.monotonic() - 30
    mark(tmp_path / "run", "start 5 0 a", "end 5 0 7")
    assert run.poll() is None and "does not answer" in run.phase
    queue.silent_since -= batch.UNKNOWN_LIMIT_S
    assert run.poll() == 7


def test_a_job_that_ended_well_by_its_own_word_needs_no_other(tmp_path: Path) -> None:
    run, queue = make_run(tmp_path / "run")
    queue.says = JobState("5", "COMPLETING", "a")
    mark(tmp_path / "run", "start 5 0 a", "end 5 0 0")
    assert run.poll() == 0 and run.verdict() is None and not run.restart()
    assert run.record.attempts[0].state == "COMPLETED"


def test_only_a_lost_node_is_worth_another_job_and_only_so_often(
    tmp_path: Path, commands: Path
) -> None:
    run, queue = make_run(tmp_path / "run", retries=1, exclude=("z",))
    queue.says = JobState("5", "NODE_FAIL", "b", "NodeDown")
    assert run.poll() == 1 and run.restart() and run.id == "6"
    assert "sbatch --parsable --exclude=z,b job.sh" in commands.read_text()
    assert run.warnings == ("Slurm job 5 lost a node: b; job 6 replaces it without b",)
    assert (tmp_path / "run" / "attempts" / "5.0" / "logs").is_dir()
    queue.says = JobState("6", "NODE_FAIL", "b", "NodeDown")
    assert run.poll() == 1 and not run.restart()
    kept = read_slurm_record(tmp_path / "run")
    assert kept and [(a.job, a.state) for a in kept.attempts] == [
        ("5", "NODE_FAIL"),
        ("6", "NODE_FAIL"),
    ]
    assert kept.excluded == {"b": "Slurm job 5 lost a node: b"}


@pytest.mark.parametrize(
    ("sinfo", "printed", "names"),
    [
        ("echo 'b|down*|none'", "", ": b"),
        ("echo 'b|idle|none'", "srun: error: Node failure on b\n", ": b"),
        ("echo 'b|idle|none'", "", " of a,b"),
    ],
)
def test_a_node_that_slurm_took_off_the_jobs_list_is_the_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sinfo: str, printed: str, names: str
) -> None:
    put(tmp_path, monkeypatch, sinfo=sinfo)
    run, queue = make_run(tmp_path / "run", retries=0)
    queue.says = JobState("5", "RUNNING", "a,b")
    mark(tmp_path / "run", "start 5 0 a,b")
    assert run.poll() is None
    (tmp_path / "run" / "slurm-5.log").write_text(printed)
    queue.says = JobState("5", "NODE_FAIL", "a")
    assert run.poll() == 1
    verdict = run.verdict()
    assert verdict and verdict.reason == f"Slurm job 5 lost a node{names}"
    assert verdict.hosts == (("b",) if printed or "down" in sinfo else ())


@pytest.mark.parametrize("state", ["TIMEOUT", "CANCELLED", "COMPLETED", "OUT_OF_MEMORY"])
def test_other_ends_are_final(tmp_path: Path, state: str) -> None:
    run, queue = make_run(tmp_path / "run", retries=5)
    queue.says = JobState("5", state, "a")
    assert run.poll() is not None and not run.restart() and run.id == "5"


def test_hosts_that_were_asked_for_are_not_replaced(tmp_path: Path) -> None:
    run, queue = make_run(tmp_path / "run", retries=5, hosts=("a", "b"))
    queue.says = JobState("5", "NODE_FAIL", "b")
    assert run.poll() == 1 and not run.restart()
    verdict = run.verdict()
    assert verdict and verdict.hosts == ("b",)


def test_a_refused_second_job_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, queue = make_run(tmp_path / "run")
    queue.says = JobState("5", "NODE_FAIL", "b")
    put(tmp_path, monkeypatch, sbatch="echo 'sbatch: error: no nodes' >&2; exit 1")
    assert run.poll() == 1 and not run.restart()
    assert "no replacement job could be submitted" in run.warnings[-1]
    assert "no nodes" in run.warnings[-1]


def test_a_cancellation_that_slurm_did_not_take_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = put(
        tmp_path,
        monkeypatch,
        squeue='echo "5|$(cat said 2>/dev/null || echo RUNNING)|a|None"',
        scancel="[ $(grep -c scancel calls) -gt 1 ] && echo CANCELLED >said",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(batch, "POLL_S", 0.3)
    run, _ = make_run(tmp_path / "run")
    run.queue = Queue(max_interval_s=0.05)
    assert run.stop() == 143 and calls.read_text().count("scancel") == 2
    assert run.record.attempts[-1].state == "CANCELLED"


def test_a_second_interrupt_does_not_keep_the_cancellation_from_going_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Path
) -> None:
    run, queue = make_run(tmp_path / "run")

    def interrupted(job: str, urgent: bool = False) -> JobState | None:
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, "state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.stop()
    assert commands.read_text().splitlines()[-1] == "scancel 5"


def test_a_job_left_alone_by_a_silent_slurm_is_not_taken_for_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run")
    put(tmp_path, monkeypatch, scancel="exit 1", squeue="exit 1")
    with pytest.raises(SystemFaultError, match="may still be running"):
        slurm.cancel_orphan(tmp_path / "run")
    assert orphan_job(tmp_path / "run")
    put(tmp_path, monkeypatch, squeue="echo 'Invalid job id specified' >&2; exit 1")
    assert slurm.cancel_orphan(tmp_path / "run") == "5" and orphan_job(tmp_path / "run") is None


def test_a_job_put_back_too_often_is_cancelled(tmp_path: Path, commands: Path) -> None:
    run, queue = make_run(tmp_path / "run", retries=1, requeue=True)
    for restart in range(2):
        mark(tmp_path / "run", f"start 5 {restart} a")
        queue.says = JobState("5", "RUNNING", "a")
        assert run.poll() is None and not run.timed_out
        queue.says = JobState("5", "PENDING", "", "BeginTime")
        assert run.poll() == 1
        assert run.restart() == (restart == 0)
    assert "scancel 5" in commands.read_text()
    assert [attempt.restart for attempt in run.record.attempts] == [0, 1]


def test_logs_are_put_away_once_whoever_does_it(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "steps").mkdir()
    (tmp_path / "mlperf").mkdir()
    (tmp_path / "logs" / "launcher.log").write_text("first")
    (tmp_path / "mlperf" / "result.txt").write_text("first")
    diary = SlurmJournal(tmp_path)
    diary.begin("5")
    diary.archive_output()
    (tmp_path / "logs" / "launcher.log").write_text("second")
    diary.archive_output()
    for name in ("logs/launcher.log", "mlperf/result.txt"):
        assert (tmp_path / "attempts" / "5.0" / name).read_text() == "first"
    assert not (tmp_path / "mlperf").exists()
    assert (tmp_path / "logs" / "launcher.log").read_text() == "second"


def test_marks_are_those_of_the_latest_start(tmp_path: Path) -> None:
    assert read_markers(tmp_path, "5") is None
    mark(
        tmp_path,
        "start 4 0 x",
        "end 4 0 1",
        "start 5 0 a",
        "end 5 0 3",
        "start 5 1 b c",
        "nonsense",
    )
    assert read_markers(tmp_path, "5") == JobMarkers(restart=1, nodes="b c")
    mark(tmp_path, "end 5 1 9")
    assert read_markers(tmp_path, "5") == JobMarkers(restart=1, nodes="b c", code=9)


def test_a_job_of_a_dead_controller_is_followed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(tmp_path / "run")
    run.warn("a warning of the first controller")
    put(tmp_path, monkeypatch, squeue="echo '5|RUNNING|a|None'")

    left = slurm.attach(run.job, tmp_path / "run")

    assert left is not None and left.id == "5" and left.warnings == run.warnings
    left.queue = Queue(max_interval_s=0.05)
    left.queue.watch("5")
    assert left.poll() is None and "5" in left.phase
    put(tmp_path, monkeypatch, squeue="echo '5|COMPLETED|a|None'")
    mark(tmp_path / "run", "start 5 0 a", "end 5 0 0")
    wait_until(lambda: left.poll() == 0, "the job to end")
    record = read_slurm_record(tmp_path / "run")
    assert record and [attempt.exit_code for attempt in record.attempts] == [0]
    assert slurm.attach(run.job, tmp_path / "run") is None, "its end is recorded"


@pytest.mark.parametrize("recorded", ["queue", "output"])
def test_a_job_that_the_dead_controller_had_no_time_to_record_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    put(
        tmp_path,
        monkeypatch,
        squeue=f"printf '%-20s%s\\n' 7 /other/slurm-7.log 8 {folder}/slurm-8.log",
    )
    if recorded == "output":
        (folder / "slurm-8.log").touch()
        put(tmp_path, monkeypatch, squeue="true")
    left = slurm.attach(make_job(), folder)
    assert left is not None and left.id == "8"
    put(tmp_path, monkeypatch, squeue="echo 'slurm_load_jobs error: timed out' >&2; exit 1")
    (tmp_path / "other").mkdir()
    with pytest.raises(SystemFaultError, match="timed out"):
        slurm.attach(make_job(), tmp_path / "other")


def test_a_job_left_alone_is_found_until_its_end_is_recorded(tmp_path: Path) -> None:
    assert orphan_job(tmp_path) is None
    diary = SlurmJournal(tmp_path)
    diary.begin("5")
    left = orphan_job(tmp_path)
    assert left and (left.job, left.code) == ("5", None)
    mark(tmp_path, "start 5 0 a", "end 5 0 0")
    left = orphan_job(tmp_path)
    assert left and left.code == 0
    diary.note(exit_code=0, state="COMPLETED")
    assert orphan_job(tmp_path) is None
