"""The result of `paceline explain`."""

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
    "expert imbalance",
    "dispatch",
    "recompute",
    "small micro-batch",
    "memory allocator",
    "host gap",
    "slow steps",
]
BaselineKind = Literal["itself", "run", "reference", "estimate"]


class CauseEvidence(Value):
    """A measurement or setting that supports a cause."""

    what: str
    value: float
    unit: str
    n: NonNegativeInt | None
    """Number of steps, samples or ranks measured; None for a setting or a formula."""
    source: str


class Cause(Value):
    """One cause of lost time."""

    cause: CauseName
    share: float
    """Share of the lost time, 0-1."""
    seconds: float
    """Seconds lost per mean step."""
    evidence: tuple[CauseEvidence, ...]
    remedy: str


class Explanation(Value):
    """The causes of a run's step time, largest first."""

    schema_version: Literal[1] = 1
    run: str
    baseline_kind: BaselineKind
    baseline: str
    """Description of the baseline."""
    step_s: float
    """Mean step in seconds, spikes included."""
    baseline_s: float | None
    """Step time of the baseline in seconds; None if the run is its own baseline."""
    n: NonNegativeInt
    """Number of steps averaged in `step_s`."""
    lost_s: float
    """Seconds per step beyond the baseline, or without one the time in which no rank worked."""
    causes: tuple[Cause, ...]
    unexplained_s: float
    """Seconds of `lost_s` that no cause explains."""
    parts_s: dict[str, float]
    """Seconds of the mean step by part; their sum is `step_s`."""
    baseline_parts_s: dict[str, float] | None
    differences: tuple[str, ...] = ()
    """Settings and environment in which the two runs differ."""
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Cause | None:
        """The largest cause; None if there is none."""
        return self.causes[0] if self.causes else None
