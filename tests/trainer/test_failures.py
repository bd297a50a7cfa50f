"""Whatever goes wrong in one of two real ranks, the job ends soon and the right rank is named."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import pytest

from paceline.runs.ending import Ending, find_ending, read_evidence, stacks
from tests.trainer.example import settings, start
from tests.waiting import wait_until

RANKS = 2
HANG_LIMIT_S = 5.0
LIMIT_S = 240.0
AT_ONCE = 3
FAULTY = """
import ctypes, os, signal, sys, time
from paceline.trainer import main
from paceline.trainer.model.decoder import Decoder

def fault():
    how = os.environ["FAULT"]
    print("the fault", how, flush=True)
    if how == "raise":
        raise ValueError("broken on purpose")
    if how == "sleep":
        time.sleep(1000)
    if how == "lock":
        ctypes.PyDLL(None).sleep(1000)
    if how == "bad_alloc":
        ctypes.CDLL("libstdc++.so.6")._ZSt17__throw_bad_allocv()
    os.kill(os.getpid(), getattr(signal, how))

forward, micro_batches = Decoder.forward, [0]

def faulty(self, *args, **kwargs):
    micro_batches[0] += 1
    time.sleep(0.3)
    if micro_batches[0] >= 3 and os.environ["RANK"] in os.environ["VICTIMS"]:
        fault()
    return forward(self, *args, **kwargs)

Decoder.forward = faulty
os._exit(main.main(sys.argv[1]))
"""
FAULTS = {
    "raise": "1", "SIGKILL": "1", "SIGABRT": "0", "bad_alloc": "1", "sleep": "1", "lock": "0",
    "lock both": "01",
}  # fmt: skip
"""The faults in the third step, and in which ranks they are."""


@dataclass
class Job:
    """A training in which a fault lies."""

    folder: Path
    process: Popen[str]
    ended: float | None = None

    @property
    def ending(self) -> Ending:
        return find_ending(read_evidence(self.folder, RANKS, self.process.returncode, False))

    @property
    def seconds_to_end(self) -> float:
        """From the rank's last sign of life to the end of the job."""
        assert self.ended is not None
        times = [path.stat().st_mtime for path in self.folder.glob("logs/rank-*.log")]
        return self.ended - max(times)

    def stacks(self) -> list[str]:
        return [text for _, text in sorted(stacks(self.folder).items())]


def begin(folder: Path, fault: str, victims: str) -> Job:
    raw = settings(RANKS, 1000, source="synthetic", num_layers=1, hang_limit_s=HANG_LIMIT_S)
    folder.mkdir()
    program = folder / "faulty.py"
    program.write_text(FAULTY)
    how = fault.partition(" ")[0]
    return Job(folder, start(folder, raw, program, FAULT=how, VICTIMS=victims))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Job]:
    """All faulty jobs, ended; some run side by side, because the hung ones only wait."""
    place = tmp_path_factory.mktemp("jobs")
    found: dict[str, Job] = {}
    for first in range(0, len(FAULTS), AT_ONCE):
        started = {
            fault: begin(place / fault.replace(" ", "-"), fault, victims)
            for fault, victims in list(FAULTS.items())[first : first + AT_ONCE]
        }
        try:
            wait_for(started.values())
        finally:
            for job in started.values():
                job.process.kill()
        found |= started
    return found


def wait_for(jobs: Collection[Job]) -> None:
    def all_ended() -> bool:
        for job in jobs:
            if job.ended is None and job.process.poll() is not None:
                job.ended = time.time()
                (job.folder / "logs" / "launcher.log").write_text(
                    "".join(job.process.communicate())
                )
        return all(job.ended is not None for job in jobs)

    wait_until(all_ended, f"{[job.folder.name for job in jobs]}", LIMIT_S)


@pytest.mark.parametrize(
    ("fault", "status", "rank", "reason"),
    [
        ("raise", "failed", 1, "rank 1: ValueError: broken on purpose"),
        ("SIGKILL", "failed", 1, "rank 1 was killed by SIGKILL"),
        ("SIGABRT", "failed", 0, "rank 0 was killed by SIGABRT"),
        ("bad_alloc", "oom", 1, "rank 1: std::bad_alloc in C++ code"),
        ("sleep", "failed", 1, "rank 1: no progress for 5 s in step 3: not inside a collective"),
        ("lock", "failed", 0, "no progress for 5 s in step 3"),
        ("lock both", "failed", None, "no progress: its watchdog could not run"),
    ],
)
def test_the_rank_at_fault_is_named(
    jobs: Mapping[str, Job], fault: str, status: str, rank: int | None, reason: str
) -> None:
    ending = jobs[fault].ending

    assert ending.status == status and reason in (ending.reason or ""), ending
    assert rank is None or ending.rank == rank


@pytest.mark.parametrize("fault", ["raise", "SIGKILL", "SIGABRT", "bad_alloc"])
def test_one_failed_rank_ends_the_job_soon(jobs: Mapping[str, Job], fault: str) -> None:
    assert jobs[fault].seconds_to_end < 30
    assert jobs[fault].process.returncode != 0


@pytest.mark.parametrize("fault", ["sleep", "lock", "lock both"])
def test_every_rank_of_a_hung_job_leaves_its_stack(jobs: Mapping[str, Job], fault: str) -> None:
    found = jobs[fault].stacks()

    assert len(found) == RANKS
    assert sum("in fault" in text for text in found) == len(FAULTS[fault])
    assert all("in main" in text for text in found)


def test_a_crash_leaves_a_stack(jobs: Mapping[str, Job]) -> None:
    text = stacks(jobs["SIGABRT"].folder)[os.path.join("logs", "rank-00000.stack")]  # noqa: PTH118
    assert text.startswith("Fatal Python error: Aborted") and "in fault" in text
