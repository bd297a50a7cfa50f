"""What a run yields: status, metrics with their spread and window, verdict."""

from __future__ import annotations

from collections.abc import Mapping
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


LONG_WARMUP_STEPS = 10
LONG_WARMUP_SHARE = 0.25
"""A warm-up of so many steps, and of so large a share of them, is worth a warning."""


class LevelShift(Value):
    """A step from which on all take another time, as a machine that throttles makes them."""

    first_step: int
    """The first on the new level, as the log prints it."""
    ratio: float
    """New level over old level."""
    left_out: bool = False
    """Whether the old level was left out of the window as if it had been warm-up."""

    @property
    def sentence(self) -> str:
        """What a reader must know of it."""
        way = "slower" if self.ratio > 1 else "faster"
        size = abs(self.ratio - 1)
        if self.left_out:
            return (
                f"level-shift: from step {self.first_step:,} on the steps are {size:.1%} {way} "
                "than before; the figures are of the new level, the steps before it are left out"
            )
        return (
            f"level-shift: from step {self.first_step:,} on the steps are {size:.1%} {way} than "
            "before; the median is that of the level with more steps"
        )


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
    shift: LevelShift | None = None
    """A lasting change of level at which the run has no one step time."""
    global_batch: int | None = None
    seq_len: int | None = None

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader must know of the window, a sentence each."""
        remarks: list[str] = []
        if self.state == "drifting" and self.drift is not None:
            remarks.append(f"the step time drifts by {self.drift:+.1%} over the window")
        if self.shift:
            remarks.append(self.shift.sentence)
        n = self.n + self.n_warmup
        long = self.n_warmup >= LONG_WARMUP_STEPS and self.n_warmup > LONG_WARMUP_SHARE * n
        if self.rule == "auto" and self.state != "none" and long and not self.shift:
            remarks.append(
                f"long-warm-up: {self.n_warmup:,} of {n:,} steps are left out as warm-up; a longer "
                "run shows whether the rest is settled"
            )
        return tuple(remarks)

    @property
    def supports_verdict(self) -> bool:
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


def impossible_figure(metrics: Mapping[str, Metric]) -> str | None:
    """Return why the metrics of a run cannot be true, or None: an MFU above 100%."""
    mfu = finite_value(metrics.get("mfu"))
    if mfu is None or mfu <= 1:
        return None
    return f"impossible MFU of {mfu:.0%}: check device, number of devices, model and dtype"


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


class RunVerdict(Value):
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
    verdict: RunVerdict
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
    steps_requested: NonNegativeInt = 0
    warnings: tuple[str, ...] = ()
