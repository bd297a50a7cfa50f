"""What a run yields: status, metrics with their spread and window, verdict."""

from __future__ import annotations

from math import isfinite
from typing import Any, Literal

from pydantic import field_validator

from paceline.core.value import NonNegativeInt, Value

Status = Literal[
    "queued", "running", "ok", "oom", "timeout", "nan", "failed", "incomplete", "cancelled"
]
FINAL: frozenset[str] = frozenset({"ok", "oom", "timeout", "nan", "failed", "cancelled"})
"""Statuses that a controller writes when it is done; `incomplete` is found by others."""


AS_PRINTED = "as printed"
LAST_STEP = "last"
"""Rules by which a figure without a spread may be judged: its source defines it so."""


class WindowRecord(Value):
    """Which steps a figure is taken from, and by which rule."""

    rule: str
    """`auto` (the steady window), `last`, `35:44`, `skip:5` or `as printed`."""
    first_step: int | None
    """Step number as the log prints it; None when there are no steps."""
    last_step: int | None
    n: NonNegativeInt
    n_warmup: NonNegativeInt
    state: Literal["steady", "short", "drifting", "uneven", "none"]
    """Uneven: its steps keep to no one level, so that the mean step counts, not the median."""
    half_width_s: float | None = None
    """The band around the median in which a step counts as steady."""
    drift: float | None = None
    """Relative change of the step time over the window by the Theil-Sen slope."""
    global_batch: int | None = None
    seq_len: int | None = None

    @property
    def judgeable(self) -> bool:
        """Whether a verdict may rest on it: steady steps, or a rule of one figure."""
        return self.rule in (AS_PRINTED, LAST_STEP) or self.state in (
            "steady",
            "drifting",
            "uneven",
        )


class Metric(Value):
    """One figure with what is needed to believe it; None = unknown, and `note` says why."""

    value: float | None
    unit: str
    n: NonNegativeInt | None = None
    """Number of steps (or ranks) behind the value."""
    spread: float | None = None
    """Robust relative spread, 1.4826 x MAD / median."""
    low: float | None = None
    high: float | None = None
    """95 % interval; `interval` says of what kind."""
    interval: str | None = None
    statistic: str | None = None
    """How the value comes from the steps: `median`, `mean`, `p95`, `max`, `sum`."""
    convention: str | None = None
    source: str | None = None
    note: str | None = None

    @field_validator("value", "spread", "low", "high", mode="before")
    @classmethod
    def _unknown_where_not_finite(cls, number: Any) -> Any:
        # What was measured beside it must not be lost to one figure that came to NaN.
        return None if isinstance(number, float) and not isfinite(number) else number


def finite_value(metric: Metric | None) -> float | None:
    """The metric's value if it is a finite number."""
    if metric is None or metric.value is None or not isfinite(metric.value):
        return None
    return metric.value


class RankSummary(Value):
    """One rank over the window, in median seconds of a step."""

    rank: NonNegativeInt
    host: str
    stage: NonNegativeInt = 0
    """Its place on the pipeline axis; only ranks of one stage do equal work."""
    step_time_s: float | None
    busy_time_s: float | None
    comm_wait_s: float | None
    data_wait_s: float | None
    memory_bytes: dict[str, float] = {}
    """Peaks by kind: allocated, reserved, resident, device_used."""
    cores: str | None = None
    """Hardware threads that it could use, `0-3,8`."""
    bound: bool | None = None
    """Whether it was bound to them; None where the log does not say."""


class RankMemory(Value):
    """What one rank's memory was used for, from one early step that was watched."""

    rank: NonNegativeInt
    step: NonNegativeInt
    kind: str | None
    """What `at_peak_bytes` adds up to: `tracked` tensors, or the allocator's `allocated` peak."""
    why: str | None = None
    """Why the peak is not told by part, or which parts could not be told apart."""
    watcher_bytes: float | None = None
    """What the tracker itself added to the resident set; figures of the kind `resident` hold it."""
    parts_bytes: dict[str, float | None]
    """Weights, gradients, optimizer, buffers as held; gathered weights, activations and other at
    the peak; context: what was in use before the model."""
    at_peak_bytes: dict[str, float] | None
    peak_bytes: dict[str, float | None]
    """Peaks of the watched step by kind: allocated, reserved, device_used, resident, tracked."""
    watched_step_s: float | None = None
    """Time of the watched step, which is in no other figure."""

    @property
    def size_bytes(self) -> float:
        """The rank's whole peak: what the device or process used, else tensors with the context."""
        peaks = [self.peak_bytes.get(kind) for kind in ("device_used", "resident")]
        peak = next((value for value in peaks if value is not None), None)
        return peak or sum(v or 0.0 for v in self.parts_bytes.values())


class MemoryByPart(Value):
    """Every rank's memory by part, beside the limit and the static lower bound."""

    largest_rank: NonNegativeInt
    ranks: tuple[RankMemory, ...]
    limit_bytes: float | None = None
    limit: str | None = None
    """What the limit is."""
    limit_counts_context: bool = True
    """False where the limit is on what a rank takes beyond its context."""
    bound_bytes: dict[str, float] = {}
    """The static lower bound of the most loaded rank, by part."""
    watch_cost_s: float | None = None
    """How much longer the watched step took than the median steady step, slowest rank."""


class Straggler(Value):
    """The rank that is busiest among those of equal work, which the others wait for."""

    rank: NonNegativeInt
    host: str
    stage: NonNegativeInt = 0
    """The pipeline stage within which it was compared."""
    excess: float
    """Its busy time over the median rank's of its stage, minus 1."""
    share_of_steps: float
    """Share of the window's steps in which this rank was the busiest of its stage."""
    named: bool
    """True when the excess is beyond chance and 1 %: only then is it blamed."""


class ReferenceComparison(Value):
    """This run beside one published row."""

    reference: str
    source: str
    metric: str
    reference_value: float
    unit: str
    ratio: float | None
    statistic: str | None = None
    """The step time of this run held against it: `median`, or `mean` for a printed average."""
    comparable: bool
    why_not: str | None = None
    resolution: float = 0.0
    """Half the reference's last printed digit, relative: it widens the margin."""
    known_error: float = 0.0
    """Standard error of the ratio's logarithm as far as the steps of this one run tell it."""


class Verdict(Value):
    """What the run says when held against its best reference."""

    kind: Literal["pass", "slower", "faster", "undecided", "invalid", "none"]
    confidence: Literal["low", "normal"] = "low"
    sentence: str


class Result(Value):
    """The outcome of one run; `paceline run --json` prints it."""

    schema_version: int = 1
    run: str
    recipe: str
    status: Status
    reason: str | None = None
    """Why the status is not ok, in one sentence."""
    log_tail: tuple[str, ...] = ()
    created: str | None = None
    """ISO 8601, UTC."""
    metrics: dict[str, Metric] = {}
    headline: str = "tokens_per_s"
    """The metric that states this workload's speed."""
    window: WindowRecord | None = None
    conventions: dict[str, str] = {}
    verdict: Verdict
    references: tuple[ReferenceComparison, ...] = ()
    ranks: tuple[RankSummary, ...] = ()
    memory: MemoryByPart | None = None
    """None when no step was watched for it."""
    straggler: Straggler | None = None
    versions: dict[str, str] = {}
    num_parameters: int | None = None
    resumed_after: NonNegativeInt = 0
    """The step whose checkpoint the run went on from; 0 when it began anew."""
    steps_done: NonNegativeInt = 0
    steps_asked: NonNegativeInt = 0
    warnings: tuple[str, ...] = ()
