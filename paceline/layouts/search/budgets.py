"""Recomputation between none and full: the budgets that a search tries of a cut of the model.

A larger budget never takes longer and never needs less memory, so of all budgets only the largest
that fits is of interest, and none at all where a cut fits without recomputation or not with full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.estimate.model.case import Floats

BUDGETS = tuple(tenths / 10 for tenths in range(1, 10))
"""Shares that are looked at. A decoder block with a gated ffn keeps its attention from about 0.3 on
and all of its products from about 0.8 on."""
_CUT = ("tp", "pp", "cp", "vp", "ep", "micro_batch", "zero_stage", "schedule")


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
