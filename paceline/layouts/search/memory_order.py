"""Which layouts need at least the memory of another: where one ran out, they need no try."""

from __future__ import annotations

from paceline.core.layout import Layout

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
