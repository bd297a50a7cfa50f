"""What a tuning yields: one row a layout that was tried, the best of them, and what was learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log
from statistics import median
from typing import Literal

import numpy as np
from pydantic import PositiveFloat

from paceline.compare.fastest import MIN_CHANCE, RankedOption, rank_options
from paceline.core.layout import AXIS_FIELDS, Layout
from paceline.core.result import Status
from paceline.core.units import counted, percent, significant
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.estimate.fit.interval import Z80
from paceline.estimate.memory.device_memory import verdict
from paceline.layouts.search.decision import close_to, seconds_of
from paceline.layouts.search.residuals import Posterior
from paceline.layouts.sweep.result import SINGLE_RUNS, Prediction, certainty
from paceline.layouts.tune.search import Search, TriedLayout
from paceline.layouts.tune.trials import LayoutRunner


class Expected(Value):
    """An expected step time; 80 % lie between low and high."""

    step_time_s: PositiveFloat
    low_s: PositiveFloat
    high_s: PositiveFloat


class TuneRow(Value):
    """One layout that was tried."""

    number: PositiveInt
    """Its place in the order of first tries."""
    layout: Layout
    label: str
    dp: PositiveInt
    status: Status | Literal["refused"]
    reason: str | None = None
    step_time_s: float | None = None
    """Of several runs the median of their medians."""
    num_runs: NonNegativeInt
    tokens_per_s: float | None = None
    before: Expected
    """Before any run of the tuning."""
    expected: Expected
    """Just before its own first run."""
    after: Expected
    """After all runs."""
    memory_bytes: float | None = None
    """Measured, of the fullest rank."""
    memory_kind: str | None = None
    runs: tuple[str, ...] = ()
    """Folders of its runs."""
    own: bool = False
    """The recipe's own layout."""
    p_best: float | None = None
    """Probability that it is the fastest of those that were tried, 0 to 1; None where none of them
    ran twice."""
    best: bool = False
    level: bool = False
    """Not told apart from the best."""

    @property
    def prediction_error(self) -> float | None:
        """Expected just before its run over measured step time, minus 1."""
        return self.expected.step_time_s / self.step_time_s - 1 if self.step_time_s else None


class Untried(Value):
    """A layout that was not tried, and why."""

    layout: Layout
    label: str
    after: Expected
    reason: str


class Effect(Value):
    """The best layout with one setting changed."""

    setting: str
    """`micro_batch 4`."""
    instead_of: str
    ratio: PositiveFloat
    """Step time over the best one's."""
    measured: bool
    """Else expected after all runs."""


class TuneResult(Value):
    """What `paceline tune` prints as JSON."""

    schema_version: int = 1
    name: str
    recipe: str
    variant: str | None = None
    device: str
    devices: PositiveInt
    oversubscribed: bool
    """More processes than physical cores."""
    budget: str
    num_runs: NonNegativeInt
    took_s: float
    """Of all runs together."""
    n_layouts: NonNegativeInt
    """Layouts that can run."""
    n_infeasible: NonNegativeInt
    n_pruned: NonNegativeInt
    """Out of memory by the estimate."""
    n_dominated: NonNegativeInt
    """Not tried because of those that ran out of memory: they need as much, or surely too much."""
    n_hopeful: NonNegativeInt
    """Layouts that may still be faster than the best at the stop, or be the first with a figure."""
    stop: Literal["bound", "budget", "exhausted", "interrupted", "not begun"]
    rows: tuple[TuneRow, ...]
    effects: tuple[Effect, ...] = ()
    untried: tuple[Untried, ...] = ()
    """The most promising ones that were not tried."""
    recipe_file: str | None = None
    """The best layout as a recipe."""
    go_on: str | None = None
    """The command that goes on; None when the search is over."""
    evidence: str
    sentences: tuple[str, ...] = ()

    @property
    def best(self) -> TuneRow | None:
        """The fastest row."""
        return next((row for row in self.rows if row.best), None)


AXES = (*AXIS_FIELDS, "micro_batch", "zero_stage", "recomputation", "schedule")
FOLLOWS = {"tp": ("sequence_parallel",), "recomputation": ("recompute", "recompute_budget")}
"""Fields that go with an axis."""
MOST_UNTRIED = 5
MOST_EFFECTS = 6
SHORT = {"micro_batch": "mbs", "zero_stage": "zero", "recomputation": "recompute"}


def label(layout: Layout, devices: int) -> str:
    """`dp 2 tp 2 mbs 4 full`."""
    parts = [layout.label(devices), f"mbs {layout.micro_batch}"]
    parts += [layout.recomputation] if layout.recompute != "none" else []
    parts += [layout.schedule] if layout.schedule != "1f1b" else []
    return " ".join(parts)


def prediction(search: Search, row: int) -> Prediction:
    """What is expected of a layout now, as a sweep tells it."""
    now = expected(search.belief, row)
    return Prediction(
        step_time_s=now.step_time_s,
        low_s=now.low_s,
        high_s=now.high_s,
        memory_bytes=float(search.candidates.memory_bytes[row]),
        p_oom=(odds := float(search.p_oom[row])),
        memory=verdict(odds),
    )


def expected(belief: Posterior, row: int) -> Expected:
    """What a belief says of a layout's next run."""
    sd = float(np.hypot(belief.sd[row], belief.noise_sd))
    mean = float(belief.mean[row])
    low, middle, high = (float(np.exp(mean + side * Z80 * sd)) for side in (-1, 0, 1))
    return Expected(step_time_s=middle, low_s=low, high_s=high)


def rows_of(search: Search, runs: LayoutRunner | None) -> tuple[TuneRow, ...]:
    """The layouts that were tried, in the order of their first runs."""
    best = search.best
    level = close_to(best, search.measured, search.belief.noise_sd) if best is not None else []
    standing_of = _ranked_options(search)
    level += [row for row, each in standing_of.items() if each.faster_than_best >= MIN_CHANCE]
    rows = [
        _row(search, number, tried, runs, tried.row == best, tried.row in level)
        for number, tried in enumerate(search.tried.values(), start=1)
    ]
    chances = [(each := standing_of.get(row)) and each.chance for row in search.tried]
    return tuple(
        row.model_copy(update={"p_best": chance}) for row, chance in zip(rows, chances, strict=True)
    )


def _ranked_options(search: Search) -> dict[int, RankedOption]:
    """Each measured layout's standing by its runs; empty where none ran twice."""
    rows = [*search.measured]
    if search.best is None:
        return {}
    of_each = rank_options([search.measured[row] for row in rows], rows.index(search.best))
    return dict(zip(rows, of_each or (), strict=False))


def _row(
    search: Search,
    number: int,
    tried: TriedLayout,
    runs: LayoutRunner | None,
    best: bool,
    level: bool,
) -> TuneRow:
    spec, row = search.candidates.spec, tried.row
    layout = search.candidates.layouts[row]
    seconds = seconds_of(tried.seconds) if tried.seconds else None
    training, devices = spec.training, spec.world_size
    figures = runs.figures(row) if runs else None
    last = tried.outcomes[-1]
    return TuneRow(
        number=number,
        layout=layout,
        label=label(layout, devices),
        dp=layout.dp(devices),
        status="ok" if seconds else last.status,
        reason=None if seconds else last.reason,
        step_time_s=seconds,
        num_runs=sum(run.status != "refused" for run in tried.outcomes),
        tokens_per_s=training.global_batch * training.seq_len / seconds if seconds else None,
        before=expected(search.first, row),
        expected=expected(tried.expected, row),
        after=expected(search.belief, row),
        memory_bytes=figures.memory_bytes if figures else None,
        memory_kind=figures.memory_kind if figures else None,
        runs=figures.runs if figures else (),
        own=row == search.candidates.recipe_row,
        best=best,
        level=level,
    )


def effects(search: Search) -> tuple[Effect, ...]:
    """The best layout with one setting changed, the largest differences first."""
    best = search.best
    if best is None:
        return ()
    layouts, base = search.candidates.layouts, seconds_of(search.measured[best])
    changes: list[Effect] = []
    for row, layout in enumerate(layouts):
        changed = _changed(layouts[best], layout)
        if len(changed) != 1:
            continue
        measured = row in search.measured
        seconds = (
            seconds_of(search.measured[row]) if measured else float(np.exp(search.belief.mean[row]))
        )
        changes.append(
            Effect(
                setting=_setting(layout, changed[0]),
                instead_of=_setting(layouts[best], changed[0]),
                ratio=seconds / base,
                measured=measured,
            )
        )
    return tuple(sorted(changes, key=lambda effect: -abs(log(effect.ratio))))


def _changed(layout: Layout, other: Layout) -> list[str]:
    """The axes in which two layouts differ; two where something else does as well."""
    names = [name for name in AXES if getattr(layout, name) != getattr(other, name)]
    ignored = {*AXES, *(field for name in names for field in FOLLOWS.get(name, ()))}
    same = layout.model_dump(exclude=ignored) == other.model_dump(exclude=ignored)
    return names if same else [*names, "", ""]


def _setting(layout: Layout, name: str) -> str:
    return f"{SHORT.get(name, name)} {getattr(layout, name)}"


def untried(search: Search) -> tuple[Untried, ...]:
    """The fastest expected of the layouts that were not tried, with why."""
    layouts, devices = search.candidates.layouts, search.candidates.spec.world_size
    belief, hopeful, out = search.belief, search.hopeful, search.surely_out
    rows = [row for row in np.argsort(belief.mean).tolist() if row not in search.tried]
    return tuple(
        Untried(
            layout=layouts[row],
            label=label(layouts[row], devices),
            after=expected(belief, row),
            reason=_why_not(search, row, bool(hopeful[row]), bool(out[row])),
        )
        for row in rows[:MOST_UNTRIED]
    )


def _why_not(search: Search, row: int, hopeful: bool, out: bool) -> str:
    if out:
        return "runs out of memory too, going by those that did"
    if not search.candidates.likely_to_fit[row]:
        return (
            f"out of memory with {percent(float(search.candidates.p_oom[row]), 0)} by the estimate"
        )
    if hopeful:
        return _LEFT[search.stop]
    return "even its optimistic bound is slower than the best"


def sentences(result: TuneResult, noise_sd: float) -> Iterator[str]:
    """What was found, what helps how much, why it stopped, and what was never tried."""
    best = result.best
    if best is not None:
        yield from _of_the_best(result, best)
        yield from _of_the_axes(result)
    yield from _of_the_predictions(result.rows, noise_sd)
    yield _WHY[result.stop].format(
        layouts=counted(result.n_hopeful, "layout"),
        runs=counted(result.num_runs, "run"),
        budget=result.budget,
    )
    yield _never_tried(result)


_LEFT = {
    "budget": "may still be faster, but the budget was spent",
    "interrupted": "may still be faster, but the search was broken off",
    "not begun": "may be the fastest",
}
_WHY = {
    "not begun": "nothing was started; {runs} known from before, {layouts} may be worth a try",
    "bound": "stopped after {runs}: of no other layout is even the optimistic bound (95%) "
    "faster than the best",
    "budget": "stopped because the budget of {budget} was spent ({runs}); {layouts} may "
    "still be faster, a larger --budget goes on",
    "exhausted": "stopped after {runs}: every layout that can be tried was tried",
    "interrupted": "broken off after {runs}; {layouts} may still be faster",
}


def _of_the_best(result: TuneResult, best: TuneRow) -> Iterator[str]:
    level = [row.label for row in result.rows if row.level]
    yield (
        f"best: {best.label}, {significant(best.step_time_s or 0.0, 4)} s a step, "
        f"{best.tokens_per_s:,.0f} tokens/s "
        f"({counted(best.num_runs, 'run')})"
        + (f", the fastest with {certainty(best.p_best)}" if best.p_best is not None else "")
        + (f"; not told apart from it: {', '.join(level)}" if level else "")
    )
    recipe = next((row for row in result.rows if row.own), None)
    if recipe is not None and recipe.step_time_s and best.step_time_s and not recipe.best:
        gain = recipe.step_time_s / best.step_time_s - 1
        yield f"the recipe's own layout ({recipe.label}) takes {percent(gain, 1)} longer"
    measured = [row for row in result.rows if row.step_time_s]
    if best.p_best is None and len(measured) > 1:
        yield SINGLE_RUNS


def _of_the_axes(result: TuneResult) -> Iterator[str]:
    changes = [
        f"{effect.setting} instead of {effect.instead_of} {100 * (effect.ratio - 1):+.0f}%"
        + ("" if effect.measured else " (expected)")
        for effect in result.effects[:MOST_EFFECTS]
    ]
    if changes:
        yield f"the best layout with one setting changed: {', '.join(changes)}"


def _of_the_predictions(rows: Sequence[TuneRow], noise_sd: float) -> Iterator[str]:
    good = [row for row in rows if row.step_time_s]
    if not good:
        return
    first, then = (
        median(abs(log(getattr(row, name).step_time_s / (row.step_time_s or 1.0))) for row in good)
        for name in ("before", "expected")
    )
    yield (
        f"expected against measured, {counted(len(good), 'layout')}: median error "
        f"{percent(first, 1)} before "
        f"any run, {percent(then, 1)} just before each layout's own; runs of one layout scatter by "
        f"{percent(noise_sd, 1)}"
    )


def _never_tried(result: TuneResult) -> str:
    tried = len(result.rows)
    parts = [
        (result.n_infeasible, "cannot run, because sizes do not divide or a rule forbids them"),
        (result.n_pruned, "would run out of memory by the estimate"),
        (result.n_dominated, "run out of memory too, going by those that did"),
        (result.n_hopeful, "are left"),
        (
            result.n_layouts - tried - result.n_pruned - result.n_dominated - result.n_hopeful,
            "are expected to be slower, in doubt too",
        ),
    ]
    counts = [f"{n:,} {why}" for n, why in parts if n > 0]
    return (
        f"{tried:,} of {counted(result.n_layouts, 'layout')} tried; "
        f"never tried: {'; '.join(counts) or 'none'}"
    )
