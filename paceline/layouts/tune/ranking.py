"""Ranking every layout of a recipe on a cluster by its estimate, before anything runs."""

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
from paceline.core.units import counted, gib
from paceline.core.value import Value
from paceline.estimate.estimates import MAX_P_OOM_TO_FIT, Estimates, estimates_of_layouts
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.memory.device_memory import Verdict, verdict
from paceline.estimate.model.case import Implementation
from paceline.estimate.request import EstimateRequest
from paceline.layouts.search.memory import between, largest_that_fit, that_take_budgets
from paceline.layouts.search.space import Space, feasible


class RankedLayout(Value):
    """One layout with its estimate; 80 % lie between low and high."""

    layout: Layout
    label: str
    step_time_s: float
    low_s: float
    high_s: float
    memory_bytes: float
    """Device memory in use on the fullest rank."""
    p_oom: float
    fits: bool
    memory: Verdict
    """What the odds of running out of it are called: borderline from 10 to 90 %."""


class Ranking(Value):
    """All layouts, best first."""

    recipe: str
    device: str
    devices: int
    n_layouts: int
    """Layouts that were estimated; of one cut's budgets of recomputation the largest that fits."""
    n_infeasible: int
    """Combinations that cannot run, because sizes do not divide or a rule forbids them."""
    n_pruned: int
    """Estimated ones that run out of memory with more than even odds, the bound of pruning."""
    bound: str
    least_memory_bytes: float
    """What a device must have for the layout that needs least, listed or not."""
    layouts: tuple[RankedLayout, ...]
    recipe_layout: RankedLayout | None
    """The recipe's own layout, for comparison; None where it cannot run on them."""
    recipe_problem: str | None = None
    """Why it cannot run: a size that does not divide, or the rule that it breaks."""
    evidence: str


def rank(question: EstimateRequest, evidence: Evidence, space: Space, top: int) -> Ranking:
    """The `top` fastest layouts that fit; raises UserError when none divides the devices.

    All are ranked by the closed form of a step, and the first ones again by following their
    pipelines. Cuts of the model that fit only with recomputation get the largest budget of it that
    fits. The recipe's own layout stands beside them where it can run on so many devices.
    """
    spec, machine = question.spec_of_any_layout, question.machine
    if machine.device.memory_bytes is None:
        raise UserError(machine.device.name, "has no memory size in the catalog")
    sizes = (spec.world_size, spec.training.global_batch, spec.training.seq_len)
    stack = question.resolved_software.implementation_on(machine)
    layouts, refused = feasible(spec.model, *sizes, worth(space.around(spec.layout), stack))
    if not layouts:
        raise UserError(
            f"{spec.recipe} on {counted(spec.world_size, 'device')}", "has no layout that divides"
        )
    estimated = partial(
        estimates_of_layouts, spec, machine, evidence, software=question.resolved_software
    )
    every = estimated(layouts)
    budgets = _budgets(spec, layouts, every, estimated, top)
    likely = [*(layouts[row] for row in _best_first(every)[:top]), *budgets]
    likely = [likely[row] for row in _best_first(estimated(likely))[:top]]
    problems = layout_problems(spec.parallel)
    own = [] if problems else [spec.layout]
    best = estimated([*likely, *own]).simulated()
    rows = _rows(best, [*likely, *own])
    again = _best_first(best.pick(np.arange(len(likely))))
    return Ranking(
        recipe=spec.recipe,
        device=machine.device.name,
        devices=spec.world_size,
        n_layouts=len(layouts) + len(budgets),
        n_infeasible=refused,
        n_pruned=int((~every.fits).sum()),
        bound=f"more than {MAX_P_OOM_TO_FIT:.0%} likely to exceed {gib(every.device_bytes[0])}",
        least_memory_bytes=float(every.memory.needed.min()),
        layouts=tuple(rows[row] for row in again),
        recipe_layout=rows[-1] if own else None,
        recipe_problem=problems[0] if problems else None,
        evidence=evidence.title,
    )


def worth(space: Space, stack: Implementation) -> Space:
    """The space without selective recomputation where a stack keeps no scores to compute again."""
    if stack != "fused":
        return space
    return replace(space, recompute=tuple(kind for kind in space.recompute if kind != "selective"))


def _budgets(
    spec: RunSpec,
    layouts: Sequence[Layout],
    every: Estimates,
    estimated: Callable[[list[Layout]], Estimates],
    top: int,
) -> list[Layout]:
    """Layouts that recompute by a budget and may be among the `top` fastest that fit.

    None is faster than its cut without recomputation.
    """
    seconds = every.step_time_s
    fitting = np.sort(seconds[every.fits])
    bar = fitting[top - 1] if len(fitting) >= top else inf
    cuts = between(layouts, every.p_oom, MAX_P_OOM_TO_FIT)
    promising = [layouts[cut.full] for cut in cuts if seconds[cut.none] < bar]
    cut = that_take_budgets(spec, promising)
    return largest_that_fit(cut, lambda some: estimated(some).p_oom, MAX_P_OOM_TO_FIT)


def _best_first(estimates: Estimates) -> NDArray[np.int64]:
    """The rows: those that fit, the fastest of them, the smallest of equally fast ones."""
    return np.lexsort((estimates.memory.device_used, estimates.step_time_s, ~estimates.fits))


def _rows(estimates: Estimates, layouts: Sequence[Layout]) -> tuple[RankedLayout, ...]:
    columns = (
        estimates.step_time_s,
        *estimates.interval_s,
        estimates.memory.device_used,
        estimates.p_oom,
        estimates.fits,
    )
    values = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(
        RankedLayout(
            layout=layout,
            label=layout.label(int(estimates.x.devices[0])),
            step_time_s=seconds,
            low_s=low,
            high_s=high,
            memory_bytes=used,
            p_oom=odds,
            fits=fits,
            memory=verdict(odds),
        )
        for layout, (seconds, low, high, used, odds, fits) in zip(layouts, values, strict=True)
    )
