"""Memory in a search: recompute budgets, and inference from layouts that ran out of memory.

A larger recompute budget never takes longer and never needs less memory. So only the largest
budget that fits matters, and none if a split fits without recomputation or not even with full.
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
"""Fractions of activations to save. A decoder block with a gated FFN saves its attention from about
0.3 and the outputs of all GEMMs from about 0.8."""
_SPLIT_FIELDS = (*AXIS_FIELDS, "micro_batch", "zero_stage", "schedule")


class RecomputeChoice(NamedTuple):
    """Rows of a model split that fits with full checkpointing but not without."""

    none: int
    full: int


def splits_needing_recompute(
    layouts: Sequence[Layout], odds: Floats, bound: float
) -> list[RecomputeChoice]:
    """Return the splits whose OOM probability exceeds `bound` unless blocks are recomputed."""
    out = dict(enumerate((odds > bound).tolist()))
    none = {
        _split_key(layouts[row]): row
        for row in out
        if out[row] and layouts[row].recompute == "none"
    }
    full = [row for row in out if not out[row] and layouts[row].recompute == "full"]
    return [
        RecomputeChoice(none[key], row) for row in full if (key := _split_key(layouts[row])) in none
    ]


def largest_fitting_budgets(
    layouts: Iterable[Layout], odds_of: Callable[[list[Layout]], Floats], bound: float
) -> list[Layout]:
    """Return each layout with the largest budget whose OOM probability is at most `bound`."""
    by_layout = [[with_recompute_budget(layout, share) for share in BUDGETS] for layout in layouts]
    every = [layout for row in by_layout for layout in row]
    if not every:
        return []
    fits = (odds_of(every) <= bound).reshape(len(by_layout), len(BUDGETS)).sum(axis=1)
    return [row[count - 1] for row, count in zip(by_layout, fits.tolist(), strict=True) if count]


def layouts_supporting_budgets(spec: RunSpec, layouts: Iterable[Layout]) -> list[Layout]:
    """Return the layouts in which the engine supports recompute budgets."""
    unsupported_features = engine(spec.engine).unsupported
    return [
        layout
        for layout in layouts
        if not unsupported_features(
            spec.model_copy(update={"layout": with_recompute_budget(layout, BUDGETS[0])})
        )
    ]


def with_recompute_budget(layout: Layout, share: float) -> Layout:
    """Return the layout with a recompute budget: the fraction of activations that it saves."""
    return layout.model_copy(update={"recompute": "budget", "recompute_budget": share})


def _split_key(layout: Layout) -> tuple[object, ...]:
    return tuple(getattr(layout, name) for name in _SPLIT_FIELDS)


RECOMPUTE_ORDER = ("none", "selective", "full")
"""Recomputation modes, from the most to the fewest saved activations."""
EQUAL_FIELDS = ("pp", "vp", "ep", "effective_schedule", "dp_shard", "cp_exchange")
MICROBATCH_FIELDS = ("tp", "cp", "micro_batch")
"""Fields that determine the number of micro-batches."""


def needs_at_least_memory_of(layout: Layout, other: Layout) -> bool:
    """Return whether `layout` needs at least the memory of `other` on the same devices.

    True only if every axis agrees: equal stages and schedule, no larger tensor or context groups,
    no higher ZeRO stage, no smaller micro-batch and no more recomputation. GPipe stores activations
    of every micro-batch, so the number of micro-batches must be equal too.
    """
    same = (
        (*EQUAL_FIELDS, *MICROBATCH_FIELDS)
        if layout.effective_schedule == "gpipe"
        else EQUAL_FIELDS
    )
    return all(getattr(layout, name) == getattr(other, name) for name in same) and (
        layout.tp <= other.tp
        and layout.cp <= other.cp
        and layout.zero_stage <= other.zero_stage
        and layout.micro_batch >= other.micro_batch
        and _saves_at_least(layout, other)
        # With sequence parallelism, even smaller tensor groups may store fewer activations.
        and (not layout.sequence_parallel or other.sequence_parallel)
    )


def _saves_at_least(layout: Layout, other: Layout) -> bool:
    """Return whether `layout` recomputes no more; selective and a budget are incomparable."""
    if "selective" in (layout.recompute, other.recompute):
        both = layout.recompute, other.recompute
        return "budget" not in both and RECOMPUTE_ORDER.index(both[0]) <= RECOMPUTE_ORDER.index(
            both[1]
        )
    saved_share = {"none": 1.0, "full": 0.0}
    share, others = (
        saved_share.get(each.recompute, each.recompute_budget or 0.0) for each in (layout, other)
    )
    return share >= others


SHARED_ERROR_SCALE = 0.15
"""Scale of ln(actual / estimated memory) shared by all layouts: Student's t with 3 degrees of
freedom, because an estimate may be far off."""
LAYOUT_ERROR_SD = 0.08
"""Standard deviation of one layout's error around the shared error."""
OUTLIER_SHARE = 0.03
"""Fraction of runs that run out of memory, or fit, for other reasons."""
LOGISTIC = 1.702
"""The logistic function of 1.702 x approximates the normal distribution within 0.01."""
ERRORS = np.linspace(-2.0, 2.0, 161)
"""Grid of the shared error for numerical integration."""
LIMIT_MARGIN = 0.5
"""Range, in ln bytes, of an unknown limit above and below all layouts."""


def p_oom_after_runs(
    memory_bytes: Floats, limit_bytes: Floats, ran_out: Mapping[int, bool], estimated_p_oom: Floats
) -> Floats:
    """Return the probability, 0-1, of each layout to run out of memory.

    `memory_bytes` and `limit_bytes` are the estimated need and the limit; an unknown limit is
    infinite. `ran_out` maps rows that ran to whether they ran out of memory. Until one has, or if
    all needs are equal, the result is `estimated_p_oom`.
    """
    if not any(ran_out.values()) or np.ptp(memory_bytes) == 0:
        return estimated_p_oom
    has_limit = np.isfinite(limit_bytes)
    log_excess = np.log(memory_bytes / np.where(has_limit, limit_bytes, memory_bytes.max()))
    errors, weights = _prior(log_excess, bool(has_limit.all()))
    rows = np.array(list(ran_out), dtype=np.int64)
    out = np.array(list(ran_out.values()))
    likely = OUTLIER_SHARE + (1 - 2 * OUTLIER_SHARE) * _p_above_limit(log_excess[rows], errors)
    logs = np.log(weights) + np.log(np.where(out[:, None], likely, 1 - likely)).sum(axis=0)
    posterior = np.exp(logs - logs.max())
    return np.asarray(
        _p_above_limit(log_excess, errors) @ (posterior / posterior.sum()), dtype=np.float64
    )


def _prior(log_excess: Floats, has_limits: bool) -> tuple[Floats, Floats]:
    """Return (errors, weights); an unknown limit has a flat prior."""
    if has_limits:
        return ERRORS, (1 + (ERRORS / SHARED_ERROR_SCALE) ** 2 / 3) ** -2
    errors = np.linspace(-LIMIT_MARGIN, float(np.ptp(log_excess)) + LIMIT_MARGIN, len(ERRORS))
    return errors, np.ones_like(errors)


def _p_above_limit(log_excess: Floats, errors: Floats) -> Floats:
    """Return the probability that a layout exceeds the limit, shape (layouts, errors)."""
    z = LOGISTIC * (log_excess[:, None] + errors[None, :]) / LAYOUT_ERROR_SD
    return 1 / (1 + np.exp(-np.clip(z, -50.0, 50.0)))
