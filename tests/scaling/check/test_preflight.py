"""A check that Slurm gives no place to ends in time, says why, and leaves no job behind."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from paceline.core.errors import EXIT_INCOMPLETE, IncompleteError
from paceline.machines import Handle, JobEnd
from paceline.scaling.check.preflight import wait_for_end


@dataclass
class Queued(Handle):
    """A job that waits for a number of polls."""

    looks: int
    stopped: bool = False
    seen: list[int] = field(default_factory=list[int])

    @property
    def timed_out(self) -> bool:
        return False

    @property
    def waiting(self) -> bool:
        return len(self.seen) < self.looks

    @property
    def phase(self) -> str:
        return "job 7 waits in Slurm's queue: Resources"

    def poll(self) -> int | None:
        self.seen.append(1)
        return None if len(self.seen) < self.looks + 1 else 0

    def stop(self) -> int:
        self.stopped = True
        return 143

    def sweep(self) -> None: ...

    def verdict(self) -> JobEnd | None:
        return None


def test_a_job_that_waits_too_long_is_cancelled_with_the_queues_reason():
    job = Queued(looks=10_000)
    with pytest.raises(
        IncompleteError, match=r"within 0.3 s: job 7 waits .* Resources; --wait"
    ) as error:
        wait_for_end(job, 0.3, "check")
    assert job.stopped and error.value.exit_code == EXIT_INCOMPLETE


def test_a_job_that_begins_in_time_goes_on():
    job = Queued(looks=2)
    assert wait_for_end(job, 60.0, "check") is None and not job.stopped
