"""What a sweep yields: one row a combination, the best, and the front of speed and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log
from statistics import median
from typing import Literal

from pydantic import PositiveFloat

from paceline.compare.fastest import MIN_CHANCE, RankedOption, rank_options
from paceline.core.layout import Layout
from paceline.core.result import Metric, Status
from paceline.core.units import counted, step_seconds
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.estimate.memory.device_memory import Verdict

SINGLE_RUNS = (
    "each ran once: how much runs of one layout scatter is not known, and so not how sure the best "
    "is; repeat those at the top"
)
RowStatus = Status | Literal["refused", "pruned", "waiting"]
"""A run's status, or why there is none: it cannot run, it was not worth it, it has yet to run."""
MARGIN = 0.01
"""Rows that are slower than the best by less are not told apart from it."""


class Prediction(Value):
    """What was expected of one combination before it ran; 80 % lie between low and high."""

    step_time_s: PositiveFloat
    low_s: PositiveFloat
    high_s: PositiveFloat
    memory_bytes: PositiveFloat
    """Device memory in use on the fullest rank."""
    p_oom: float
    memory: Verdict
    """What the odds of running out of it are called: borderline from 10 to 90 %."""


class SweepRow(Value):
    """One combination of settings and what it gave; None where it has no figure."""

    settings: dict[str, str]
    """What varies, by field."""
    status: RowStatus
    reason: str | None = None
    key: str | None = None
    nodes: PositiveInt | None = None
    devices: PositiveInt | None = None
    """Of all nodes together."""
    dp: PositiveInt | None = None
    layout: Layout
    global_batch: PositiveInt | None = None
    seq_len: PositiveInt | None = None
    step_time_s: float | None = None
    """Median of the steady steps; of several runs the median of their medians."""
    low_s: float | None = None
    high_s: float | None = None
    spread: float | None = None
    """Relative: of the steps in one run, or from run to run."""
    n: NonNegativeInt | None = None
    """Steps behind the step time, or runs where there are several."""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    """Token positions, padding included."""
    model_flops_per_s_per_device: float | None = None
    hardware_flops_per_s_per_device: float | None = None
    """With recomputation counted as work."""
    mfu: float | None = None
    memory_bytes: float | None = None
    memory_kind: str | None = None
    """What the memory is of: device_used, reserved or resident; the largest rank's peak."""
    prediction: Prediction | None = None
    runs: tuple[str, ...] = ()
    """Folders of its runs."""
    run_step_times_s: tuple[float, ...] = ()
    """Of each run that has a figure."""
    p_best: float | None = None
    """Probability that it is the fastest of all, 0 to 1; None where no combination ran twice."""
    best: bool = False
    level: bool = False
    """Not told apart from the best."""
    pareto: bool = False
    """No other row is as fast with as little memory."""

    @property
    def ok(self) -> bool:
        """Whether it has a speed."""
        return self.status == "ok" and self.tokens_per_s is not None

    @property
    def label(self) -> str:
        """What varies, in short: `tp 2 mbs 4`."""
        return label(self.settings)

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured step time, minus 1."""
        if self.prediction is None or self.step_time_s is None:
            return None
        return self.prediction.step_time_s / self.step_time_s - 1


class SweepResult(Value):
    """What `paceline sweep` prints as JSON: every combination, in the order in which they ran."""

    schema_version: int = 1
    name: str
    recipe: str
    variant: str | None = None
    dimensions: dict[str, tuple[str, ...]]
    repeats: PositiveInt = 1
    """Runs that were asked for of each."""
    flops_convention: str | None
    """None where every combination was refused."""
    stack: str | None = None
    """Software whose times and memory were expected; None is that of the recipe's engine."""
    rows: tuple[SweepRow, ...]
    interrupted: bool = False
    halted: str | None = None
    """Why nothing more could be run: an allocation that ended, hosts that were lost."""
    go_on: str | None = None
    """The command that runs what is missing; None when nothing is."""
    sentences: tuple[str, ...] = ()

    @property
    def best(self) -> SweepRow | None:
        """The row with the most tokens/s."""
        return next((row for row in self.rows if row.best), None)


def label(settings: Mapping[str, str]) -> str:
    """Settings in short: `tp 2 mbs 4`."""
    return " ".join(f"{_short(field)} {value}" for field, value in settings.items())


def marked(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """The rows with the best, those level with it, and the front of speed and memory marked."""
    good = [row for row in rows if row.ok]
    if not good:
        return tuple(rows)
    best = max(good, key=lambda row: (row.tokens_per_s or 0.0, -(row.memory_bytes or 0.0)))
    standing_of = _ranked_options(good, best)
    return tuple(
        row.model_copy(
            update={
                "best": row is best,
                "level": row is not best and row.ok and _level(row, best, standing_of.get(id(row))),
                "pareto": row.ok and _undominated(row, good),
                "p_best": standing.chance if (standing := standing_of.get(id(row))) else None,
            }
        )
        for row in rows
    )


def _ranked_options(good: Sequence[SweepRow], best: SweepRow) -> dict[int, RankedOption]:
    """Each row's standing by the seconds that its runs took for a token; empty without repeats."""
    if not all(row.run_step_times_s for row in good):
        return {}
    # A row may have another batch: seconds a token, of which the row's own is 1 / tokens_per_s.
    seconds = [
        [run / ((row.tokens_per_s or 1.0) * (row.step_time_s or 1.0)) for run in runs]
        for row in good
        if (runs := row.run_step_times_s)
    ]
    of_each = rank_options(seconds, next(at for at, row in enumerate(good) if row is best))
    return {id(row): each for row, each in zip(good, of_each or (), strict=False)}


def sentences(rows: Sequence[SweepRow]) -> Iterator[str]:
    """What the marked rows say, the best layout first."""
    best = next((row for row in rows if row.best), None)
    if best is not None:
        level = [row.label for row in rows if row.level]
        yield (
            f"best: {best.label}, {best.tokens_per_s:,.0f} tokens/s, "
            f"{step_seconds(best.step_time_s or 0.0)} s a step"
            + (f", the fastest with {certainty(best.p_best)}" if best.p_best is not None else "")
            + (f"; not told apart from it: {', '.join(level)}" if level else "")
        )
        good = [row for row in rows if row.ok]
        if len(good) > 1 and all(len(row.run_step_times_s) == 1 for row in good):
            yield SINGLE_RUNS
    yield tally(rows)
    errors = [abs(log(1 + e)) for row in rows if (e := row.prediction_error) is not None]
    if errors:
        yield (
            f"predicted against measured: median error {100 * median(errors):.1f}%, "
            f"largest {100 * max(errors):.1f}%, {counted(len(errors), 'layout')}"
        )


def certainty(chance: float) -> str:
    """`93 % probability`, `more than 99 % probability`."""
    return "more than 99% probability" if chance > 0.99 else f"{chance:.0%} probability"


def tally(rows: Sequence[SweepRow]) -> str:
    """`12 combinations: 8 ok, 2 oom, 2 refused`."""
    statuses = [row.status for row in rows]
    parts = [
        f"{statuses.count(status)} {status}"
        for status in dict.fromkeys(sorted(statuses, key=_rank))
    ]
    return f"{counted(len(rows), 'combination')}: {', '.join(parts)}"


def figure_fields(figures: dict[str, Metric]) -> dict[str, float | int | str | None]:
    """The fields of a row that come from a run's metrics, or from a group's."""
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


def _level(row: SweepRow, best: SweepRow, standing: RankedOption | None) -> bool:
    """Whether it may be faster by its runs, or it or its interval reaches the best row's."""
    slower = (best.tokens_per_s or 0.0) / (row.tokens_per_s or 1.0) - 1
    if standing is not None:
        return slower <= MARGIN or standing.faster_than_best >= MIN_CHANCE
    return slower <= max(MARGIN, _half_width(row) + _half_width(best))


def _half_width(row: SweepRow) -> float:
    """Half the interval of the step time over the step time, 0 without one."""
    if row.low_s is None or row.high_s is None or not row.step_time_s:
        return 0.0
    return (row.high_s - row.low_s) / 2 / row.step_time_s


def _undominated(row: SweepRow, good: Sequence[SweepRow]) -> bool:
    """Whether no other row is as fast with as little memory and better in one of the two."""
    if row.memory_bytes is None:
        return False
    point = (row.tokens_per_s or 0.0, -row.memory_bytes)
    others = [(r.tokens_per_s or 0.0, -r.memory_bytes) for r in good if r.memory_bytes is not None]
    return not any(
        other != point and other[0] >= point[0] and other[1] >= point[1] for other in others
    )
