"""What `paceline explain` answers."""

from __future__ import annotations

from typing import Literal

from paceline.core.value import NonNegativeInt, Value

CauseName = Literal[
    "data starvation",
    "checkpoint stalls",
    "slow rank",
    "other load",
    "clock limit",
    "thread binding",
    "pipeline bubble",
    "slow link",
    "recompute",
    "small micro-batch",
    "memory allocator",
    "host gap",
]
Against = Literal["itself", "run", "reference", "estimate"]


class CauseEvidence(Value):
    """One figure that speaks for a cause."""

    what: str
    value: float
    unit: str
    n: NonNegativeInt | None
    """Steps, samples or ranks behind it; None for what is a setting or a formula."""
    source: str


class Cause(Value):
    """One reason for which time was lost."""

    cause: CauseName
    share: float
    """Of the lost time, 0-1."""
    seconds: float
    """Of the mean step."""
    evidence: tuple[CauseEvidence, ...]
    remedy: str


class Explanation(Value):
    """Why a run's steps are as long as they are, the largest cause first."""

    schema_version: Literal[1] = 1
    run: str
    against: Against
    baseline: str
    """What it was held against, in words."""
    step_s: float
    """Mean step, spikes included."""
    baseline_s: float | None
    """What the same step takes there; None against itself."""
    n: NonNegativeInt
    """Steps behind `step_s`."""
    lost_s: float
    """Seconds of a step beyond the baseline; against itself those in which no rank could work."""
    causes: tuple[Cause, ...]
    unexplained_s: float
    """What no cause explains of `lost_s`."""
    parts_s: dict[str, float]
    """Where the mean step's seconds went; they add up to it."""
    baseline_parts_s: dict[str, float] | None
    differences: tuple[str, ...] = ()
    """Settings and surroundings in which the two runs differ."""
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Cause | None:
        """The cause of most of the lost time; None where none is named."""
        return self.causes[0] if self.causes else None
