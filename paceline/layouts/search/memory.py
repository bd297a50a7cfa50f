"""Memory in a search: budgets of recomputation, and what a layout that ran out tells of others.

A larger budget never takes longer and never needs less memory, so of all budgets only the largest
that fits is of interest, and none at all where a cut fits without recomputation or not with full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paceline.core.layout import AXIS_FIELDS, Layout
from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.estimate.model.case import Floats

BUDGETS = tuple(tenths / 10 for tenths in range(1, 10))
"""Shares that are looked at. A decoder block with a gated ffn keeps its attention from about 0.3 on
and all of its products from about 0.8 on."""
_CUT = (*AXIS_FIELDS, "micro_batch", "zero_stage", "schedule")


class Between(NamedTuple):
    """The rows of a cut that fits with full recomputation, and not without any."""

    none: int
    full: int


def between(layouts: Sequence[Layout], odds: Floats, bound: float) -> list[Between]:
    """The cuts that run out of memory with odds above `bound` unless blocks are recomputed."""
    out = dict(enumerate((odds > bound).tolist()))
    none = {_cut(layouts[row]): row for row in out if out[row] and layouts[row].recompute == "none"}
    full = [row for row in out if not out[row] and layouts[row].recompute == "full"]
    return [Between(none[cut], row) for row in full if (cut := _cut(layouts[row])) in none]


def largest_that_fit(
    layouts: Iterable[Layout], odds_of: Callable[[list[Layout]], Floats], bound: float
) -> list[Layout]:
    """Of each layout the one with the largest budget whose odds of running out are in the bound."""
    tried = [[by_budget(layout, share) for share in BUDGETS] for layout in layouts]
    every = [layout for row in tried for layout in row]
    if not every:
        return []
    fits = (odds_of(every) <= bound).reshape(len(tried), len(BUDGETS)).sum(axis=1)
    return [row[count - 1] for row, count in zip(tried, fits.tolist(), strict=True) if count]


def that_take_budgets(spec: RunSpec, layouts: Iterable[Layout]) -> list[Layout]:
    """Those in which the engine recomputes by a budget: the native trainer alone does."""
    unsupported = engine(spec.engine).unsupported
    return [
        layout
        for layout in layouts
        if not unsupported(spec.model_copy(update={"layout": by_budget(layout, BUDGETS[0])}))
    ]


def by_budget(layout: Layout, share: float) -> Layout:
    """The layout with that share of its activations kept."""
    return layout.model_copy(update={"recompute": "budget", "recompute_budget": share})


def _cut(layout: Layout) -> tuple[object, ...]:
    return tuple(getattr(layout, name) for name in _CUT)


LESS = ("none", "selective", "full")
"""Recomputation, from what keeps most to what keeps least."""
SAME = ("pp", "vp", "ep", "effective_schedule", "dp_shard", "cp_exchange")
AS_MANY = ("tp", "cp", "micro_batch")
"""Where these are equal, so is the number of micro-batches."""


def needs_as_much(layout: Layout, other: Layout) -> bool:
    """Whether `layout` needs at least the memory of `other` on the same devices.

    Said only where every axis agrees: equal stages and schedule, and no larger tensor or context
    groups, no higher ZeRO stage, no smaller micro-batch and no more recomputation. GPipe keeps
    something of every micro-batch, so there their number must be equal too.
    """
    same = (*SAME, *AS_MANY) if layout.effective_schedule == "gpipe" else SAME
    return all(getattr(layout, name) == getattr(other, name) for name in same) and (
        layout.tp <= other.tp
        and layout.cp <= other.cp
        and layout.zero_stage <= other.zero_stage
        and layout.micro_batch >= other.micro_batch
        and _keeps_as_much(layout, other)
        # Beside it even smaller tensor groups may keep less of the activations.
        and (not layout.sequence_parallel or other.sequence_parallel)
    )


def _keeps_as_much(layout: Layout, other: Layout) -> bool:
    """Whether `layout` recomputes no more; selective and a budget are not compared."""
    if "selective" in (layout.recompute, other.recompute):
        both = layout.recompute, other.recompute
        return "budget" not in both and LESS.index(both[0]) <= LESS.index(both[1])
    kept = {"none": 1.0, "full": 0.0}
    share, others = (
        kept.get(each.recompute, each.recompute_budget or 0.0) for each in (layout, other)
    )
    return share >= others


SHARED_SCALE = 0.15
"""Of ln(needed / estimated memory), which all layouts share: Student's t with 3 degrees of freedom,
since an estimate may be far off."""
OWN_SD = 0.08
"""Deviation of one layout's error from the shared one."""
ODD = 0.03
"""Runs that run out, or fit, for reasons of their own."""
LOGISTIC = 1.702
"""The logistic function of 1.702 x is the normal distribution within 0.01."""
ERRORS = np.linspace(-2.0, 2.0, 161)
"""Values of the shared error over which it is summed."""
BEYOND = 0.5
"""How far above and below all layouts an unknown limit may lie."""


def odds_after(
    needed: Floats, limit: Floats, ran_out: Mapping[int, bool], before: Floats
) -> Floats:
    """Probability, 0-1, of each layout to run out; `ran_out` says of rows whether they did.

    `needed` and `limit` are bytes, an unknown limit is infinite. Until a layout has run out, and
    where nothing is known of the needs, they are those from `before`.
    """
    if not any(ran_out.values()) or np.ptp(needed) == 0:
        return before
    has_limit = np.isfinite(limit)
    far = np.log(needed / np.where(has_limit, limit, needed.max()))
    errors, weights = _prior(far, bool(has_limit.all()))
    rows = np.array(list(ran_out), dtype=np.int64)
    out = np.array(list(ran_out.values()))
    likely = ODD + (1 - 2 * ODD) * _beyond(far[rows], errors)
    logs = np.log(weights) + np.log(np.where(out[:, None], likely, 1 - likely)).sum(axis=0)
    posterior = np.exp(logs - logs.max())
    return np.asarray(_beyond(far, errors) @ (posterior / posterior.sum()), dtype=np.float64)


def _prior(far: Floats, has_limits: bool) -> tuple[Floats, Floats]:
    """(errors, their weights); where no limit is known each place of it counts the same."""
    if has_limits:
        return ERRORS, (1 + (ERRORS / SHARED_SCALE) ** 2 / 3) ** -2
    errors = np.linspace(-BEYOND, float(np.ptp(far)) + BEYOND, len(ERRORS))
    return errors, np.ones_like(errors)


def _beyond(far: Floats, errors: Floats) -> Floats:
    """(layouts, errors): probability that a layout needs more than the limit."""
    z = LOGISTIC * (far[:, None] + errors[None, :]) / OWN_SD
    return 1 / (1 + np.exp(-np.clip(z, -50.0, 50.0)))
