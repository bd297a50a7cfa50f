"""Result of a run: status, metrics with spread and window, verdict."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal

from pydantic import field_validator

from paceline.core.fabric import FabricProof
from paceline.core.value import NonNegativeInt, Value

Status = Literal[
    "queued", "running", "ok", "oom", "timeout", "nan", "failed", "incomplete", "cancelled"
]
FINAL: frozenset[str] = frozenset({"ok", "oom", "timeout", "nan", "failed", "cancelled"})
"""Final statuses written by a controller. `incomplete` is not final and is detected later."""


AS_PRINTED = "as printed"
LAST_STEP = "last"
"""Rules that support a verdict without a spread, because the reference defines its figure in this
way."""


LONG_WARMUP_STEPS = 10
LONG_WARMUP_SHARE = 0.25
"""Minimum length of a long warm-up, in steps and as a share of all. It leads to a warning."""


class LevelShift(Value):
    """A step change of the step time, such as thermal throttling causes."""

    first_step: int
    """First step at the new level, as numbered in the log."""
    last_step: int | None = None
    """Last step at the new level if the step time recovers; None if the change lasts."""
    ratio: float
    """Step time of the new level divided by that of the old level."""
    left_out: bool = False
    """True if the old level was excluded from the window like warm-up."""

    @property
    def sentence(self) -> str:
        """Description of the shift for readers of the report."""
        way = "slower" if self.ratio > 1 else "faster"
        size = abs(self.ratio - 1)
        if self.last_step is not None:
            return (
                f"level-shift: steps {self.first_step:,} to {self.last_step:,} are {size:.1%} "
                f"{way} than the others; the median is that of the level with more steps"
            )
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
    """Steps from which a figure is computed, and the rule that selected them."""

    rule: str
    """Rule that selected the steps: `auto` (the steady window), `last`, `35:44`, `skip:5` or `as
    printed`."""
    first_step: int | None
    """Step number as in the log; None without steps."""
    last_step: int | None
    n: NonNegativeInt
    n_warmup: NonNegativeInt
    state: Literal["steady", "short", "drifting", "uneven", "none"]
    """State of the window. `uneven` means that the steps have no single level; then the mean step
    counts instead of the median."""
    half_width_s: float | None = None
    """Half-width in seconds of the band around the median in which a step counts as steady."""
    drift: float | None = None
    """Relative change of the step time over the window, from the Theil-Sen slope."""
    shift: LevelShift | None = None
    """Step change, because of which the run has no single step time."""
    global_batch: int | None = None
    seq_len: int | None = None

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on the window for readers of the report, one sentence each."""
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
        """True if the window supports a verdict.

        Its steps are steady, or its rule defines a single figure.
        """
        return self.rule in (AS_PRINTED, LAST_STEP) or self.state in (
            "steady",
            "drifting",
            "uneven",
        )


class Metric(Value):
    """One figure with its evidence. A value of None is unknown, and `note` states the reason."""

    value: float | None
    unit: str
    n: NonNegativeInt | None = None
    """Number of steps (or ranks) from which the value is computed."""
    spread: float | None = None
    """Robust relative spread, 1.4826 x MAD / median."""
    low: float | None = None
    high: float | None = None
    """Upper end of the 95% interval; `interval` states its kind."""
    interval: str | None = None
    statistic: str | None = None
    """Statistic of the steps: `median`, `mean`, `p95`, `max` or `sum`."""
    convention: str | None = None
    source: str | None = None
    note: str | None = None

    @field_validator("value", "spread", "low", "high", mode="before")
    @classmethod
    def _unknown_where_not_finite(cls, number: Any) -> Any:
        # One non-finite value must not invalidate the other metrics of the run.
        return None if isinstance(number, float) and not isfinite(number) else number


def impossible_figure(metrics: Mapping[str, Metric]) -> str | None:
    """Return why the metrics of a run cannot be correct (an MFU above 100%); None if they can."""
    mfu = finite_value(metrics.get("mfu"))
    if mfu is None or mfu <= 1:
        return None
    return f"impossible MFU of {mfu:.0%}: check device, number of devices, model and dtype"


def finite_value(metric: Metric | None) -> float | None:
    """Return the metric's value if it is finite; otherwise None."""
    if metric is None or metric.value is None or not isfinite(metric.value):
        return None
    return metric.value


class RankSummary(Value):
    """Median times of one rank over the window, in seconds per step."""

    rank: NonNegativeInt
    host: str
    stage: NonNegativeInt = 0
    """Pipeline stage of the rank. Only ranks of one stage do equal work."""
    step_time_s: float | None
    busy_time_s: float | None
    comm_wait_s: float | None
    data_wait_s: float | None
    memory_bytes: dict[str, float] = {}
    """Peak memory by kind: allocated, reserved, resident, device_used."""
    cores: str | None = None
    """Hardware threads available to the rank, such as `0-3,8`."""
    bound: bool | None = None
    """True if the rank was bound to these cores; None if the log does not say."""


class RankMemory(Value):
    """Memory of one rank by part, measured in one early step."""

    rank: NonNegativeInt
    step: NonNegativeInt
    kind: str | None
    """Quantity that `at_peak_bytes` adds up to: `tracked` tensors, or the allocator's `allocated`
    peak."""
    why: str | None = None
    """Reason why the peak is not reported by part, or why some parts could not be separated."""
    watcher_bytes: float | None = None
    """Resident memory of the memory tracker itself. `resident` figures include it."""
    parts_bytes: dict[str, float | None]
    """Bytes by part. Weights, gradients, optimizer and buffers are bytes held; gathered weights,
    activations and other are bytes at the peak; context is memory in use before the model was
    created."""
    at_peak_bytes: dict[str, float] | None
    peak_bytes: dict[str, float | None]
    """Peaks of the measured step by kind: allocated, reserved, device_used, resident, tracked."""
    watched_step_s: float | None = None
    """Time of the measured step in seconds. No other figure includes it."""

    @property
    def size_bytes(self) -> float:
        """Peak of the rank: memory used by device or process, otherwise tensors plus context."""
        peaks = [self.peak_bytes.get(kind) for kind in ("device_used", "resident")]
        peak = next((value for value in peaks if value is not None), None)
        return peak or sum(v or 0.0 for v in self.parts_bytes.values())


class MemoryByPart(Value):
    """Memory by part of every rank, with the limit and the static lower bound."""

    largest_rank: NonNegativeInt
    ranks: tuple[RankMemory, ...]
    limit_bytes: float | None = None
    limit: str | None = None
    """Description of the limit."""
    limit_counts_context: bool = True
    """True if the limit includes the context of a rank."""
    bound_bytes: dict[str, float] = {}
    """Static lower bound of the most loaded rank, by part."""
    watch_cost_s: float | None = None
    """Additional time of the measured step over the median steady step, for the slowest rank."""


class Straggler(Value):
    """The busiest rank among ranks with equal work, for which the others wait."""

    rank: NonNegativeInt
    host: str
    stage: NonNegativeInt = 0
    """Pipeline stage in which the rank was compared."""
    excess: float
    """Busy time of the rank divided by the median of its stage, minus 1."""
    share_of_steps: float
    """Share of steps in the window in which the rank was the busiest of its stage."""
    named: bool
    """True if the excess is above 1% and beyond chance. Only then is the rank reported."""


class ReferenceComparison(Value):
    """Comparison of a run with one published row."""

    reference: str
    source: str
    metric: str
    reference_value: float
    unit: str
    ratio: float | None
    statistic: str | None = None
    """Statistic of the step time that is compared: `median`, or `mean` for a printed average."""
    comparable: bool
    why_not: str | None = None
    resolution: float = 0.0
    """Half a unit of the reference's last printed digit, relative to its value. It widens the
    margin."""
    known_error: float = 0.0
    """Standard error of the logarithm of the ratio, as far as the steps of one run determine it."""


class RunVerdict(Value):
    """Verdict on a run compared with its best reference."""

    kind: Literal["pass", "slower", "faster", "undecided", "invalid", "none"]
    confidence: Literal["low", "normal"] = "low"
    sentence: str


class Result(Value):
    """Result of one run, printed by `paceline run --json`."""

    schema_version: int = 1
    run: str
    recipe: str
    status: Status
    reason: str | None = None
    """Reason why the status is not ok, in one sentence."""
    log_tail: tuple[str, ...] = ()
    created: str | None = None
    """Time of the run, ISO 8601, UTC; of an imported log the date in its lines, not the import."""
    metrics: dict[str, Metric] = {}
    headline: str = "tokens_per_s"
    """Metric that states the speed of this workload."""
    window: WindowRecord | None = None
    conventions: dict[str, str] = {}
    verdict: RunVerdict
    references: tuple[ReferenceComparison, ...] = ()
    ranks: tuple[RankSummary, ...] = ()
    memory: MemoryByPart | None = None
    """Memory by part; None if no step was measured for it."""
    straggler: Straggler | None = None
    fabric: FabricProof | None = None
    """Transports of the collectives; None for a single rank, and for an imported log."""
    versions: dict[str, str] = {}
    num_parameters: int | None = None
    resumed_after: NonNegativeInt = 0
    """Step of the checkpoint from which the run resumed; 0 if it started from scratch."""
    steps_done: NonNegativeInt = 0
    steps_requested: NonNegativeInt = 0
    warnings: tuple[str, ...] = ()


class WaterfallLevel(Value):
    """Throughput that remains after one cause and all previous ones."""

    name: str
    flops_per_s: float
    """FLOP/s of one device."""
    share: float
    """Share of the peak."""
    lost_s: float
    """Seconds of the step that this cause takes; negative if it saves time."""
