"""What `paceline watch` shows of one moment."""

from __future__ import annotations

from typing import Literal

from paceline.core.result import Status
from paceline.core.value import NonNegativeInt, Value


class RankNow(Value):
    """One rank over the recent steps, in median seconds of a step."""

    rank: NonNegativeInt
    host: str | None
    stage: NonNegativeInt
    step: NonNegativeInt | None
    """The last one that it has finished."""
    busy_time_s: float | None
    comm_wait_s: float | None
    data_wait_s: float | None
    memory_bytes: float | None
    """Its largest peak so far, of whatever kind it tells."""


class DevicesNow(Value):
    """The last telemetry of all hosts: means over devices, except where it says otherwise."""

    hosts: NonNegativeInt
    age_s: float
    """How old the oldest of these samples is."""
    clock_mhz: float | None = None
    lowest_clock_mhz: float | None = None
    power_w: float | None = None
    """All devices together."""
    hottest_c: float | None = None


class WatchState(Value):
    """A run at one moment; None for what it does not tell."""

    schema_version: Literal[1] = 1
    run: str
    recipe: str | None
    status: Status
    reason: str | None
    step: NonNegativeInt | None
    steps_requested: NonNegativeInt | None
    loss: float | None
    last_sign_s: float | None
    """Seconds since a rank last wrote something."""
    step_time_s: float | None
    """Median of the recent steps, slowest rank."""
    n: NonNegativeInt
    """Recent steps with a time."""
    usual_s: float | None
    """Median of all steps before these; the first step counts nowhere."""
    usual_n: NonNegativeInt
    ratio: float | None
    """`step_time_s` over `usual_s`."""
    tokens_per_s: float | None
    samples_per_s: float | None
    mfu: float | None
    achievable_fraction: float | None
    data_wait_fraction: float | None
    """Of the recent steps, slowest loader."""
    comm_wait_fraction: float | None
    """Of the recent steps, median rank."""
    waited_for: NonNegativeInt | None
    """The rank that the others of its stage wait for; None where nobody stands out."""
    waited_for_excess: float | None
    """Its busy time over the median of the others, minus 1."""
    memory_bytes: float | None
    """Largest peak of any rank."""
    eta_s: float | None
    """Until the last step, at the recent pace; checkpoints between them counted as they come."""
    ranks: tuple[RankNow, ...]
    devices: DevicesNow | None

    @property
    def ended(self) -> bool:
        """Whether nothing more is to come."""
        return self.status not in ("queued", "running")
