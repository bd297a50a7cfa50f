"""The ranks' memory by part, put beside the limit and the static lower bound."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.memory import Memory, memory_per_device
from paceline.core.result import MemoryByPart, RankMemory
from paceline.core.run import RunSettings, RunSpec


def memory_by_part(
    ranks: Iterable[RankMemory],
    spec: RunSpec | None,
    facts: RunSettings,
    device_memory_bytes: float | None,
    context_bytes: float,
    step_time_s: float | None,
) -> MemoryByPart | None:
    """All ranks in order, None without any; `context_bytes` is the catalog's for the bound."""
    by_rank = tuple(sorted(ranks, key=lambda rank: rank.rank))
    if not by_rank:
        return None
    process_limit = spec.memory_limit_bytes if spec else None
    on_cpu = facts.device == "cpu"
    limit = process_limit or facts.device_memory_bytes or device_memory_bytes
    device = "the machine's memory / processes" if on_cpu else "one device's memory"
    source = "memory_limit_bytes of the recipe" if process_limit else device
    slowest = max((r.watched_step_s for r in by_rank if r.watched_step_s is not None), default=None)
    return MemoryByPart(
        largest_rank=max(by_rank, key=lambda rank: rank.size_bytes).rank,
        ranks=by_rank,
        limit_bytes=limit,
        limit=None if limit is None else source,
        limit_counts_context=not process_limit,
        bound_bytes=_bound(spec, context_bytes) if spec else {},
        watch_cost_s=slowest - step_time_s if slowest is not None and step_time_s else None,
    )


def _bound(spec: RunSpec, context_bytes: float) -> dict[str, float]:
    """The static lower bound by the names that measured parts have."""
    need: Memory = memory_per_device(spec.parallel, context_bytes)
    # Without sharding, 16-bit copies are made by the operations that use them, as activations are.
    sharded = spec.layout.zero_stage >= 2 and spec.parallel.data_ranks > 1
    gathered = need.copies_bytes if sharded else 0.0
    made = need.activations_bytes + need.logits_bytes + need.copies_bytes - gathered
    return {
        "weights": need.weights_bytes,
        "gradients": need.gradients_bytes,
        "optimizer": need.optimizer_bytes,
        "gathered": gathered,
        "activations": made,
        "context": need.context_bytes,
    }
