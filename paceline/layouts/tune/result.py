"""Result of a layout search: one row per tried layout, the best one, and what was learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log
from statistics import median
from typing import Literal

import numpy as np
from pydantic import PositiveFloat

from paceline.compare.significance import MIN_CHANCE, RankedOption, rank_options
from paceline.core.layout import AXIS_FIELDS, Layout
from paceline.core.result import Status
from paceline.core.units import percent, pluralize, significant
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.estimate.fit.interval import Z80
from paceline.estimate.memory.device_memory import verdict
from paceline.layouts.search.decision import rows_close_to
from paceline.layouts.search.residuals import Posterior
from paceline.layouts.sweep.result import (
    SINGLE_RUNS,
    ExpectedStepTime,
    Prediction,
    probability_text,
)
from paceline.layouts.tune.search import Search, TriedLayout
from paceline.layouts.tune.trials import LayoutRunner


class TuneRow(Value):
    """One tried layout."""

    number: PositiveInt
    """Position in the order of first runs, from 1."""
    layout: Layout
    label: str
    dp: PositiveInt
    status: Status | Literal["refused"]
    reason: str | None = None
    step_time_s: float | None = None
    """Median step time; with several runs, the median of their medians."""
    num_runs: NonNegativeInt
    tokens_per_s: float | None = None
    before: ExpectedStepTime
    """Expectation before any run."""
    expected: ExpectedStepTime
    """Expectation just before the first run of this layout."""
    after: ExpectedStepTime
    """Expectation after all runs."""
    memory_bytes: float | None = None
    """Measured peak of the rank that uses most memory."""
    memory_kind: str | None = None
    runs: tuple[str, ...] = ()
    """Folders of its runs."""
    own: bool = False
    """The recipe's own layout."""
    p_best: float | None = None
    """Probability, 0-1, that it is the fastest tried layout; None if no layout ran twice."""
    best: bool = False
    tied_with_best: bool = False
    """The difference from the best layout is within noise."""

    @property
    def prediction_error(self) -> float | None:
        """Expected (just before its first run) over measured step time, minus 1."""
        return self.expected.step_time_s / self.step_time_s - 1 if self.step_time_s else None


class UntriedLayout(Value):
    """A layout that was not tried, and the reason."""

    layout: Layout
    label: str
    after: ExpectedStepTime
    reason: str


class Effect(Value):
    """The best layout with one setting changed."""

    setting: str
    """`micro_batch 4`."""
    instead_of: str
    ratio: PositiveFloat
    """Step time over the best one's."""
    measured: bool
    """False if the ratio is an expectation after all runs."""


class TuneResult(Value):
    """JSON output of `paceline tune`."""

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
    """Total time of all runs in seconds."""
    n_layouts: NonNegativeInt
    """Number of layouts that can run."""
    n_infeasible: NonNegativeInt
    n_pruned: NonNegativeInt
    """Layouts excluded because the estimate predicts OOM."""
    n_dominated: NonNegativeInt
    """Layouts excluded because one that needs no more memory ran out of memory."""
    n_hopeful: NonNegativeInt
    """Untried layouts that may still be faster than the best."""
    stop: Literal["bound", "budget", "exhausted", "interrupted", "not started"]
    rows: tuple[TuneRow, ...]
    effects: tuple[Effect, ...] = ()
    untried_layouts: tuple[UntriedLayout, ...] = ()
    """The most promising untried layouts."""
    recipe_file: str | None = None
    """The best layout as a recipe."""
    resume_command: str | None = None
    """Command that resumes the search; None if it is complete."""
    evidence: str
    sentences: tuple[str, ...] = ()

    @property
    def best(self) -> TuneRow | None:
        """Row of the fastest layout."""
        return next((row for row in self.rows if row.best), None)


AXES = (*AXIS_FIELDS, "micro_batch", "zero_stage", "recomputation", "schedule")
DEPENDENT_FIELDS = {
    "tp": ("sequence_parallel",),
    "recomputation": ("recompute", "recompute_budget"),
}
"""Layout fields that change together with an axis."""
MAX_UNTRIED = 5
MAX_EFFECTS = 6
SHORT_NAMES = {"micro_batch": "mbs", "zero_stage": "zero", "recomputation": "recompute"}


def label(layout: Layout, devices: int) -> str:
    """Return a short label such as `dp 2 tp 2 mbs 4 full`."""
    parts = [layout.label(devices), f"mbs {layout.micro_batch}"]
    parts += [layout.recomputation] if layout.recompute != "none" else []
    parts += [layout.schedule] if layout.schedule != "1f1b" else []
    return " ".join(parts)


def prediction(search: Search, row: int) -> Prediction:
    """Return the current expectation for a layout in the form that a sweep reports."""
    return Prediction(
        **dict(expected_step_time(search.belief, row)),
        memory_bytes=float(search.candidates.memory_bytes[row]),
        p_oom=(odds := float(search.p_oom[row])),
        memory=verdict(odds),
    )


def expected_step_time(belief: Posterior, row: int) -> ExpectedStepTime:
    """Return the expected step time of a layout's next run."""
    sd = float(np.hypot(belief.sd[row], belief.noise_sd))
    mean = float(belief.mean[row])
    low, middle, high = (float(np.exp(mean + side * Z80 * sd)) for side in (-1, 0, 1))
    return ExpectedStepTime(step_time_s=middle, low_s=low, high_s=high)


def tune_rows(search: Search, runs: LayoutRunner | None) -> tuple[TuneRow, ...]:
    """Return the tried layouts in the order of their first runs."""
    best = search.best
    tied_rows = (
        rows_close_to(best, search.measured, search.belief.noise_sd) if best is not None else []
    )
    standing_of = _ranked_options(search)
    tied_rows += [row for row, each in standing_of.items() if each.faster_than_best >= MIN_CHANCE]
    rows = [
        _row(
            search,
            number,
            tried_layout,
            runs,
            tried_layout.row == best,
            tried_layout.row in tied_rows,
        )
        for number, tried_layout in enumerate(search.tried_layouts.values(), start=1)
    ]
    chances = [(each := standing_of.get(row)) and each.chance for row in search.tried_layouts]
    return tuple(
        row.model_copy(update={"p_best": chance}) for row, chance in zip(rows, chances, strict=True)
    )


def _ranked_options(search: Search) -> dict[int, RankedOption]:
    """Return the rank statistics of each measured layout; empty if none ran twice."""
    rows = [*search.measured]
    if search.best is None:
        return {}
    of_each = rank_options([search.measured[row] for row in rows], rows.index(search.best))
    return dict(zip(rows, of_each or (), strict=False))


def _row(
    search: Search,
    number: int,
    tried_layout: TriedLayout,
    runs: LayoutRunner | None,
    is_best: bool,
    is_tied: bool,
) -> TuneRow:
    spec, row = search.candidates.spec, tried_layout.row
    layout = search.candidates.layouts[row]
    seconds = median(tried_layout.seconds) if tried_layout.seconds else None
    training, devices = spec.training, spec.world_size
    figures = runs.figures(row) if runs else None
    last = tried_layout.outcomes[-1]
    return TuneRow(
        number=number,
        layout=layout,
        label=label(layout, devices),
        dp=layout.dp(devices),
        status="ok" if seconds else last.status,
        reason=None if seconds else last.reason,
        step_time_s=seconds,
        num_runs=sum(run.status != "refused" for run in tried_layout.outcomes),
        tokens_per_s=training.global_batch * training.seq_len / seconds if seconds else None,
        before=expected_step_time(search.initial_belief, row),
        expected=expected_step_time(tried_layout.expected, row),
        after=expected_step_time(search.belief, row),
        memory_bytes=figures.memory_bytes if figures else None,
        memory_kind=figures.memory_kind if figures else None,
        runs=figures.runs if figures else (),
        own=row == search.candidates.recipe_row,
        best=is_best,
        tied_with_best=is_tied,
    )


def effects(search: Search) -> tuple[Effect, ...]:
    """Return the effect of changing one setting of the best layout, the largest effects first."""
    best = search.best
    if best is None:
        return ()
    layouts, base = search.candidates.layouts, median(search.measured[best])
    changes: list[Effect] = []
    for row, layout in enumerate(layouts):
        changed_axes = _changed_axes(layouts[best], layout)
        if len(changed_axes) != 1:
            continue
        measured = row in search.measured
        seconds = (
            median(search.measured[row]) if measured else float(np.exp(search.belief.mean[row]))
        )
        changes.append(
            Effect(
                setting=_setting(layout, changed_axes[0]),
                instead_of=_setting(layouts[best], changed_axes[0]),
                ratio=seconds / base,
                measured=measured,
            )
        )
    return tuple(sorted(changes, key=lambda effect: -abs(log(effect.ratio))))


def _changed_axes(layout: Layout, other: Layout) -> list[str]:
    """Return the axes in which two layouts differ; at least two if other fields differ too."""
    names = [name for name in AXES if getattr(layout, name) != getattr(other, name)]
    ignored_fields = {*AXES, *(field for name in names for field in DEPENDENT_FIELDS.get(name, ()))}
    same = layout.model_dump(exclude=ignored_fields) == other.model_dump(exclude=ignored_fields)
    return names if same else [*names, "", ""]


def _setting(layout: Layout, name: str) -> str:
    return f"{SHORT_NAMES.get(name, name)} {getattr(layout, name)}"


def untried_layouts(search: Search) -> tuple[UntriedLayout, ...]:
    """Return the untried layouts with the best expectation, and why each was not tried."""
    layouts, devices = search.candidates.layouts, search.candidates.spec.world_size
    belief, promising, out = search.belief, search.is_promising, search.surely_out
    rows = [row for row in np.argsort(belief.mean).tolist() if row not in search.tried_layouts]
    return tuple(
        UntriedLayout(
            layout=layouts[row],
            label=label(layouts[row], devices),
            after=expected_step_time(belief, row),
            reason=_untried_reason(search, row, bool(promising[row]), bool(out[row])),
        )
        for row in rows[:MAX_UNTRIED]
    )


def _untried_reason(search: Search, row: int, promising: bool, out: bool) -> str:
    if out:
        return "expected to run out of memory, as similar layouts did"
    if not search.candidates.likely_to_fit[row]:
        return f"estimated OOM probability {percent(float(search.candidates.p_oom[row]), 0)}"
    if promising:
        return _LEFT_REASONS[search.stop]
    return "the lower end of its 95% interval is slower than the best"


def sentences(result: TuneResult, noise_sd: float) -> Iterator[str]:
    """Yield a summary: the best layout, effects of settings, why the search stopped."""
    best = result.best
    if best is not None:
        yield from _best_sentences(result, best)
        yield from _effect_sentences(result)
    yield from _prediction_sentences(result.rows, noise_sd)
    yield _STOP_SENTENCES[result.stop].format(
        layouts=pluralize(result.n_hopeful, "layout"),
        runs=pluralize(result.num_runs, "run"),
        budget=result.budget,
    )
    yield _untried_sentence(result)


_LEFT_REASONS = {
    "budget": "may still be faster, but the budget is used up",
    "interrupted": "may still be faster, but the search was interrupted",
    "not started": "may be the fastest",
}
_STOP_SENTENCES = {
    "not started": "no run started; {runs} known from earlier, {layouts} worth trying",
    "bound": "stopped after {runs}: no other layout can be faster than the best, at 95% confidence",
    "budget": "stopped because the budget of {budget} is used up ({runs}); {layouts} may still be "
    "faster; continue with a larger --budget",
    "exhausted": "stopped after {runs}: every possible layout was tried",
    "interrupted": "interrupted after {runs}; {layouts} may still be faster",
}


def _best_sentences(result: TuneResult, best: TuneRow) -> Iterator[str]:
    tied_labels = [row.label for row in result.rows if row.tied_with_best]
    yield (
        f"best: {best.label}, {significant(best.step_time_s or 0.0, 4)} s per step, "
        f"{best.tokens_per_s:,.0f} tokens/s "
        f"({pluralize(best.num_runs, 'run')})"
        + (f", the fastest with {probability_text(best.p_best)}" if best.p_best is not None else "")
        + (f"; within noise of it: {', '.join(tied_labels)}" if tied_labels else "")
    )
    recipe = next((row for row in result.rows if row.own), None)
    if recipe is not None and recipe.step_time_s and best.step_time_s and not recipe.best:
        gain = recipe.step_time_s / best.step_time_s - 1
        yield f"the recipe's own layout ({recipe.label}) takes {percent(gain, 1)} longer"
    measured = [row for row in result.rows if row.step_time_s]
    if best.p_best is None and len(measured) > 1:
        yield SINGLE_RUNS


def _effect_sentences(result: TuneResult) -> Iterator[str]:
    changes = [
        f"{effect.setting} instead of {effect.instead_of} {100 * (effect.ratio - 1):+.0f}%"
        + ("" if effect.measured else " (expected)")
        for effect in result.effects[:MAX_EFFECTS]
    ]
    if changes:
        yield f"the best layout with one setting changed: {', '.join(changes)}"


def _prediction_sentences(rows: Sequence[TuneRow], noise_sd: float) -> Iterator[str]:
    good = [row for row in rows if row.step_time_s]
    if not good:
        return
    first, then = (
        median(abs(log(getattr(row, name).step_time_s / (row.step_time_s or 1.0))) for row in good)
        for name in ("before", "expected")
    )
    yield (
        f"expected vs measured, {pluralize(len(good), 'layout')}: median error "
        f"{percent(first, 1)} before "
        f"any run, {percent(then, 1)} just before each layout's first; run-to-run noise "
        f"{percent(noise_sd, 1)}"
    )


def _untried_sentence(result: TuneResult) -> str:
    num_tried = len(result.rows)
    parts = [
        (result.n_infeasible, "cannot run because a size does not divide or a rule forbids them"),
        (result.n_pruned, "would run out of memory according to the estimate"),
        (result.n_dominated, "would run out of memory, as similar layouts did"),
        (result.n_hopeful, "may still be faster"),
        (
            result.n_layouts - num_tried - result.n_pruned - result.n_dominated - result.n_hopeful,
            "are expected to be slower",
        ),
    ]
    counts = [f"{n:,} {why}" for n, why in parts if n > 0]
    return (
        f"{num_tried:,} of {pluralize(result.n_layouts, 'layout')} tried; "
        f"not tried: {'; '.join(counts) or 'none'}"
    )
