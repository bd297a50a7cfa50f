"""Rank every layout of a recipe on a cluster by its estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.layout_checks import layout_problems
from paceline.core.run import RunSpec
from paceline.core.units import gib, pluralize
from paceline.core.value import Value
from paceline.estimate.estimates import MAX_P_OOM_TO_FIT, Estimates, estimates_of_layouts
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.memory.device_memory import UNLIKELY
from paceline.estimate.model.case import Implementation
from paceline.estimate.request import EstimateRequest
from paceline.layouts.search.memory import (
    largest_fitting_budgets,
    layouts_supporting_budgets,
    splits_needing_recompute,
)
from paceline.layouts.search.space import SearchSpace, feasible_layouts
from paceline.layouts.sweep.prediction import predictions_of
from paceline.layouts.sweep.result import Prediction

MAX_BORDERLINE = 5
"""Maximum number of layouts to list that are faster than the best one but may not fit."""


class RankedLayout(Prediction):
    """One layout with its estimate and 80% interval."""

    layout: Layout
    label: str
    fits: bool


class Ranking(Value):
    """All layouts: those that fit first, then borderline ones, each by step time."""

    recipe: str
    device: str
    devices: int
    n_layouts: int
    """Number of estimated layouts; each split counts once with its largest recompute budget."""
    n_infeasible: int
    """Combinations that cannot run because a size does not divide or a rule forbids them."""
    n_pruned: int
    """Estimated layouts with an OOM probability above the pruning bound."""
    bound: str
    least_memory_bytes: float
    """Memory that a device needs for the smallest layout, listed or not."""
    layouts: tuple[RankedLayout, ...]
    borderline: tuple[RankedLayout, ...] = ()
    """The fastest layouts that may run out of memory, if they are faster than the best that
    fits."""
    recipe_layout: RankedLayout | None
    """The recipe's own layout, for comparison; None if it cannot run."""
    recipe_problem: str | None = None
    """Reason why the recipe's own layout cannot run."""
    evidence: str


def rank_layouts(
    question: EstimateRequest, evidence: Evidence, space: SearchSpace, top: int
) -> Ranking:
    """Return the `top` fastest layouts that fit, and the borderline ones that are faster.

    Ranks all layouts by the closed-form step time, and the top ones again with simulated pipelines.
    A model split that fits only with activation checkpointing gets the largest recompute budget
    that fits, and the largest that is borderline. Raises UserError if no layout divides the
    devices.
    """
    spec, machine = question.spec_of_any_layout, question.machine
    if machine.device.memory_bytes is None:
        raise UserError(machine.device.name, "has no memory size in the catalog")
    sizes = (spec.world_size, spec.training.global_batch, spec.training.seq_len)
    stack = question.resolved_software.implementation_on(machine)
    layouts, num_refused = feasible_layouts(
        spec.model, *sizes, without_useless_recompute(space.around(spec.layout), stack)
    )
    if not layouts:
        raise UserError(
            f"{spec.recipe} on {pluralize(spec.world_size, 'device')}", "has no layout that divides"
        )
    estimated = partial(
        estimates_of_layouts, spec, machine, evidence, software=question.resolved_software
    )
    estimates = estimated(layouts)
    budgets = [
        *_budgets(spec, layouts, estimates, estimated, top, UNLIKELY),
        *_budgets(spec, layouts, estimates, estimated, MAX_BORDERLINE, MAX_P_OOM_TO_FIT),
    ]
    rows = [*_best_first(estimates)[:top], *_borderline_first(estimates)[:MAX_BORDERLINE]]
    likely = list(dict.fromkeys([*(layouts[row] for row in rows), *budgets]))
    coarse = estimated(likely)
    chosen_rows = [*_best_first(coarse)[:top], *_borderline_first(coarse)[:MAX_BORDERLINE]]
    likely = [likely[row] for row in dict.fromkeys(chosen_rows)]
    problems = layout_problems(spec.parallel)
    recipe_layouts = [] if problems else [spec.layout]
    fine = estimated([*likely, *recipe_layouts]).simulated()
    layout_rows = _rows(fine, [*likely, *recipe_layouts])
    order = _best_first(fine.pick(np.arange(len(likely))))
    best = layout_rows[order[0]]
    listed_rows = set(order[:top])
    faster = [
        layout_rows[row]
        for row in order
        if row not in listed_rows
        and layout_rows[row].fits
        and layout_rows[row].step_time_s < best.step_time_s
    ]
    return Ranking(
        recipe=spec.recipe,
        device=machine.device.name,
        devices=spec.world_size,
        n_layouts=len(set(layouts) | set(budgets)),
        n_infeasible=num_refused,
        n_pruned=int((~estimates.fits).sum()),
        bound=f"more than {MAX_P_OOM_TO_FIT:.0%} likely to exceed {gib(estimates.device_bytes[0])}",
        least_memory_bytes=float(estimates.memory.needed_bytes.min()),
        layouts=tuple(layout_rows[row] for row in order[:top]),
        borderline=tuple(faster[:MAX_BORDERLINE]),
        recipe_layout=layout_rows[-1] if recipe_layouts else None,
        recipe_problem=problems[0] if problems else None,
        evidence=evidence.title,
    )


def without_useless_recompute(space: SearchSpace, stack: Implementation) -> SearchSpace:
    """Drop selective checkpointing if fused attention stores no scores to recompute."""
    if stack != "fused":
        return space
    return replace(space, recompute=tuple(kind for kind in space.recompute if kind != "selective"))


def _budgets(
    spec: RunSpec,
    layouts: Sequence[Layout],
    estimates: Estimates,
    estimated: Callable[[list[Layout]], Estimates],
    top: int,
    max_p_oom: float,
) -> list[Layout]:
    """Return layouts with a recompute budget that may be among the `top` fastest.

    Each has the largest budget with which the probability of running out of memory is at most
    `max_p_oom`.

    A split without recomputation is a lower bound on their step time.
    """
    seconds = estimates.step_time_s
    fitting = np.sort(seconds[estimates.p_oom <= max_p_oom])
    bar = fitting[top - 1] if len(fitting) >= top else inf
    choices = splits_needing_recompute(layouts, estimates.p_oom, max_p_oom)
    promising = [
        layouts[supported_layouts.full]
        for supported_layouts in choices
        if seconds[supported_layouts.none] < bar
    ]
    supported_layouts = layouts_supporting_budgets(spec, promising)
    return largest_fitting_budgets(supported_layouts, lambda some: estimated(some).p_oom, max_p_oom)


def _best_first(estimates: Estimates) -> NDArray[np.int64]:
    """Return rows sorted by risk (fits, borderline, too large), then step time, then memory."""
    risk = (estimates.p_oom >= UNLIKELY).astype(int) + ~estimates.fits
    return np.lexsort((estimates.memory.device_used, estimates.step_time_s, risk))


def _borderline_first(estimates: Estimates) -> NDArray[np.int64]:
    """Return the rows of borderline layouts, sorted by step time."""
    rows = np.flatnonzero((estimates.p_oom >= UNLIKELY) & estimates.fits)
    return rows[np.argsort(estimates.step_time_s[rows])]


def _rows(estimates: Estimates, layouts: Sequence[Layout]) -> tuple[RankedLayout, ...]:
    devices = int(estimates.x.devices[0])
    return tuple(
        RankedLayout(
            **dict(prediction),
            layout=layout,
            label=layout.label(devices),
            fits=prediction.p_oom <= MAX_P_OOM_TO_FIT,
        )
        for layout, prediction in zip(layouts, predictions_of(estimates), strict=True)
    )
