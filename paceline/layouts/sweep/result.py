"""Result of a sweep: one row per combination, the best, and the Pareto front."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log
from statistics import median
from typing import Literal

from pydantic import PositiveFloat

from paceline.compare.significance import MIN_CHANCE, RankedOption, rank_options
from paceline.core.layout import Layout
from paceline.core.result import Metric, Status
from paceline.core.units import pluralize, step_seconds
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.estimate.memory.device_memory import Verdict

SINGLE_RUNS = (
    "each layout ran once, so run-to-run noise and the confidence in the best are unknown; repeat "
    "the top ones"
)
RowStatus = Status | Literal["refused", "pruned", "waiting"]
"""Status of the run, or why there is none."""
TIE_MARGIN = 0.01
"""Rows slower than the best by less than this fraction are tied with it."""


class ExpectedStepTime(Value):
    """An expected step time with its 80% interval."""

    step_time_s: PositiveFloat
    low_s: PositiveFloat
    high_s: PositiveFloat


class Prediction(ExpectedStepTime):
    """Prediction for one layout, with an 80% interval of the step time."""

    memory_bytes: PositiveFloat
    """Device memory in use on the rank that uses most."""
    p_oom: float
    memory: Verdict
    """Memory verdict: fits, borderline (OOM probability 10-90%) or out of memory."""


class SweepRow(Value):
    """One combination of settings with its figures; None where it has none."""

    settings: dict[str, str]
    """Values of the varied fields."""
    status: RowStatus
    reason: str | None = None
    key: str | None = None
    nodes: PositiveInt | None = None
    devices: PositiveInt | None = None
    """Number of devices on all nodes."""
    dp: PositiveInt | None = None
    layout: Layout
    global_batch: PositiveInt | None = None
    seq_len: PositiveInt | None = None
    step_time_s: float | None = None
    """Median of the steady steps; with several runs, the median of their medians."""
    low_s: float | None = None
    high_s: float | None = None
    spread: float | None = None
    """Relative spread of the steps of one run, or between runs."""
    n: NonNegativeInt | None = None
    """Number of steps, or of runs if there are several."""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    """Token positions per second, including padding."""
    model_flops_per_s_per_device: float | None = None
    hardware_flops_per_s_per_device: float | None = None
    """FLOP/s including recomputation."""
    mfu: float | None = None
    memory_bytes: float | None = None
    memory_kind: str | None = None
    """Kind of memory: device_used, reserved or resident; the peak of the largest rank."""
    prediction: Prediction | None = None
    runs: tuple[str, ...] = ()
    """Folders of its runs."""
    run_step_times_s: tuple[float, ...] = ()
    """Step time of each run that has a figure."""
    p_best: float | None = None
    """Probability, 0-1, that it is the fastest; None if no combination ran twice."""
    best: bool = False
    tied_with_best: bool = False
    """The difference from the best is within noise."""
    pareto: bool = False
    """No other row is as fast with as little memory."""

    @property
    def ok(self) -> bool:
        """True if it has a throughput."""
        return self.status == "ok" and self.tokens_per_s is not None

    @property
    def label(self) -> str:
        """Short label of the varied settings: `tp 2 mbs 4`."""
        return label(self.settings)

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured step time, minus 1."""
        if self.prediction is None or self.step_time_s is None:
            return None
        return self.prediction.step_time_s / self.step_time_s - 1


class SweepResult(Value):
    """JSON output of `paceline sweep`: every combination in the order in which they ran."""

    schema_version: int = 1
    name: str
    recipe: str
    variant: str | None = None
    dimensions: dict[str, tuple[str, ...]]
    repeats: PositiveInt = 1
    """Requested runs per combination."""
    flops_convention: str | None
    """None if every combination was refused."""
    stack: str | None = None
    """Software assumed for predictions; None is that of the recipe's engine."""
    rows: tuple[SweepRow, ...]
    interrupted: bool = False
    halt_reason: str | None = None
    """Reason why no further run was possible, such as the end of an allocation or lost hosts."""
    resume_command: str | None = None
    """Command that runs the missing combinations; None if nothing is missing."""
    sentences: tuple[str, ...] = ()

    @property
    def best(self) -> SweepRow | None:
        """Row with the highest tokens/s."""
        return next((row for row in self.rows if row.best), None)


def label(settings: Mapping[str, str]) -> str:
    """Return a short label of settings: `tp 2 mbs 4`."""
    return " ".join(f"{_short(field)} {value}" for field, value in settings.items())


def mark_rows(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """Mark the best row, those tied with it, and the Pareto front of throughput and memory."""
    good = [row for row in rows if row.ok]
    if not good:
        return tuple(rows)
    best = max(good, key=lambda row: (row.tokens_per_s or 0.0, -(row.memory_bytes or 0.0)))
    standing_of = _ranked_options(good, best)
    return tuple(
        row.model_copy(
            update={
                "best": row is best,
                "tied_with_best": row is not best
                and row.ok
                and _is_tied(row, best, standing_of.get(id(row))),
                "pareto": row.ok and _is_pareto_optimal(row, good),
                "p_best": standing.chance if (standing := standing_of.get(id(row))) else None,
            }
        )
        for row in rows
    )


def _ranked_options(good: Sequence[SweepRow], best: SweepRow) -> dict[int, RankedOption]:
    """Return the rank statistics of each row by seconds per token; empty without repeats."""
    if not all(row.run_step_times_s for row in good):
        return {}
    # Batches may differ between rows, so compare seconds per token, 1 / tokens_per_s.
    seconds = [
        [run / ((row.tokens_per_s or 1.0) * (row.step_time_s or 1.0)) for run in runs]
        for row in good
        if (runs := row.run_step_times_s)
    ]
    of_each = rank_options(seconds, next(at for at, row in enumerate(good) if row is best))
    return {id(row): each for row, each in zip(good, of_each or (), strict=False)}


def sentences(rows: Sequence[SweepRow]) -> Iterator[str]:
    """Yield a summary of the marked rows, the best layout first."""
    best = next((row for row in rows if row.best), None)
    if best is not None:
        tied_labels = [row.label for row in rows if row.tied_with_best]
        yield (
            f"best: {best.label}, {best.tokens_per_s:,.0f} tokens/s, "
            f"{step_seconds(best.step_time_s or 0.0)} s per step"
            + (
                f", the fastest with {probability_text(best.p_best)}"
                if best.p_best is not None
                else ""
            )
            + (f"; within noise of it: {', '.join(tied_labels)}" if tied_labels else "")
        )
        good = [row for row in rows if row.ok]
        if len(good) > 1 and all(len(row.run_step_times_s) == 1 for row in good):
            yield SINGLE_RUNS
    yield status_counts(rows)
    errors = [abs(log(1 + e)) for row in rows if (e := row.prediction_error) is not None]
    if errors:
        yield (
            f"predicted vs measured: median error {100 * median(errors):.1f}%, "
            f"largest {100 * max(errors):.1f}%, {pluralize(len(errors), 'layout')}"
        )


def probability_text(chance: float) -> str:
    """Return text such as `93% probability` or `more than 99% probability`."""
    return "more than 99% probability" if chance > 0.99 else f"{chance:.0%} probability"


def status_counts(rows: Sequence[SweepRow]) -> str:
    """Return text such as `12 combinations: 8 ok, 2 oom, 2 refused`."""
    statuses = [row.status for row in rows]
    parts = [
        f"{statuses.count(status)} {status}"
        for status in dict.fromkeys(sorted(statuses, key=_rank))
    ]
    return f"{pluralize(len(rows), 'combination')}: {', '.join(parts)}"


def figure_fields(figures: dict[str, Metric]) -> dict[str, float | int | str | None]:
    """Return the fields of a row that come from the metrics of a run or group."""
    step = figures.get("step_time_s") or Metric(value=None, unit="s")
    kind, memory = next(
        (
            (kind, value)
            for kind in ("device_used", "reserved", "resident")
            if (value := _value(figures, f"memory_{kind}_bytes")) is not None
        ),
        (None, None),
    )
    names = (
        "samples_per_s",
        "model_flops_per_s_per_device",
        "hardware_flops_per_s_per_device",
        "mfu",
    )
    return {
        "step_time_s": step.value,
        "low_s": step.low,
        "high_s": step.high,
        "spread": step.spread,
        "n": step.n,
        **{name: _value(figures, name) for name in names},
        "tokens_per_s": _value(figures, "padded_tokens_per_s"),
        "memory_bytes": memory,
        "memory_kind": kind,
    }


def _value(figures: dict[str, Metric], name: str) -> float | None:
    return figures[name].value if name in figures else None


_ORDER = ("ok", "oom", "timeout", "nan", "failed", "incomplete", "cancelled", "waiting", "pruned")


def _rank(status: str) -> int:
    return _ORDER.index(status) if status in _ORDER else len(_ORDER)


def _short(field: str) -> str:
    last = field.rpartition(".")[2]
    return {"micro_batch": "mbs", "zero_stage": "zero", "global_batch": "gbs"}.get(last, last)


def _is_tied(row: SweepRow, best: SweepRow, standing: RankedOption | None) -> bool:
    """Return whether a row may be as fast as the best, by its runs or its interval."""
    slower = (best.tokens_per_s or 0.0) / (row.tokens_per_s or 1.0) - 1
    if standing is not None:
        return slower <= TIE_MARGIN or standing.faster_than_best >= MIN_CHANCE
    return slower <= max(TIE_MARGIN, _half_width(row) + _half_width(best))


def _half_width(row: SweepRow) -> float:
    """Return the relative half width of the step time's interval; 0 without one."""
    if row.low_s is None or row.high_s is None or not row.step_time_s:
        return 0.0
    return (row.high_s - row.low_s) / 2 / row.step_time_s


def _is_pareto_optimal(row: SweepRow, good: Sequence[SweepRow]) -> bool:
    """Return whether no other row is at least as good in both and better in one."""
    if row.memory_bytes is None:
        return False
    point = (row.tokens_per_s or 0.0, -row.memory_bytes)
    others = [(r.tokens_per_s or 0.0, -r.memory_bytes) for r in good if r.memory_bytes is not None]
    return not any(
        other != point and other[0] >= point[0] and other[1] >= point[1] for other in others
    )
