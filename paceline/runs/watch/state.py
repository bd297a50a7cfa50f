"""State of a run that `paceline runs watch` shows."""

from __future__ import annotations

from typing import Literal

from paceline.core.result import Status
from paceline.core.value import NonNegativeInt, Value


class RankNow(Value):
    """State of one rank; times are medians of the recent steps in seconds."""

    rank: NonNegativeInt
    host: str | None
    stage: NonNegativeInt
    step: NonNegativeInt | None
    """Last finished step."""
    busy_time_s: float | None
    comm_wait_s: float | None
    data_wait_s: float | None
    memory_bytes: float | None
    """Largest memory peak so far, of the kind that the rank reports."""


class DevicesNow(Value):
    """Last telemetry of all hosts: means over devices, unless stated otherwise."""

    hosts: NonNegativeInt
    age_s: float
    """Age of the oldest of these samples in seconds."""
    clock_mhz: float | None = None
    lowest_clock_mhz: float | None = None
    power_w: float | None = None
    """Total power of all devices in watts."""
    hottest_c: float | None = None


class WatchState(Value):
    """Snapshot of a run; unknown values are None."""

    schema_version: Literal[1] = 1
    run: str
    recipe: str | None
    status: Status
    reason: str | None
    step: NonNegativeInt | None
    steps_requested: NonNegativeInt | None
    loss: float | None
    last_sign_s: float | None
    """Seconds since a rank last wrote to a file."""
    step_time_s: float | None
    """Median time of the recent steps in seconds, slowest rank."""
    n: NonNegativeInt
    """Number of recent steps with a time."""
    usual_s: float | None
    """Median time of all earlier steps in seconds; the first step is always excluded."""
    usual_n: NonNegativeInt
    ratio: float | None
    """`step_time_s` divided by `usual_s`."""
    tokens_per_s: float | None
    samples_per_s: float | None
    mfu: float | None
    achievable_fraction: float | None
    data_wait_fraction: float | None
    """Fraction of the recent steps spent waiting for data, slowest loader."""
    comm_wait_fraction: float | None
    """Fraction of the recent steps spent waiting for collectives, median rank."""
    waited_for: NonNegativeInt | None
    """Rank that the others of its stage wait for; None if no rank stands out."""
    waited_for_excess: float | None
    """Busy time of that rank divided by the median of the others, minus 1."""
    memory_bytes: float | None
    """Largest memory peak of any rank in bytes."""
    eta_s: float | None
    """Seconds to the last step at the recent pace, which includes checkpoints as they occur."""
    ranks: tuple[RankNow, ...]
    devices: DevicesNow | None

    @property
    def ended(self) -> bool:
        """True if the run has ended."""
        return self.status not in ("queued", "running")
