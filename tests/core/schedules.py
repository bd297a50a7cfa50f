"""Orders of passes followed one by one, which the closed forms of the bubble have to match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Pass:
    """One pass of a stage for a micro-batch. BW is a full backward pass."""

    kind: Literal["F", "B", "W", "BW"]
    stage: int
    microbatch: int


def idle_fraction(orders: Sequence[Sequence[Pass]], duration: Callable[[Pass], float]) -> float:
    """Return the mean idle share of the ranks, 0-1, if each runs its passes in the given order.

    F waits for F of the previous stage, and B waits for B of the next stage. Communication takes no
    time. Raises ValueError if the orders form a deadlock.
    """
    rank_of = {p: rank for rank, order in enumerate(orders) for p in order}
    ends: dict[Pass, float] = {}
    free = [0.0] * len(orders)
    pending = [list(reversed(order)) for order in orders]
    while any(pending):
        ready = [
            rank for rank, queue in enumerate(pending) if queue and _ready(queue[-1], rank_of, ends)
        ]
        if not ready:
            raise ValueError("the orders of passes form a deadlock")
        for rank in ready:
            work = pending[rank].pop()
            arrivals = (ends[need] for need in _needs(work) if need in rank_of)
            free[rank] = ends[work] = max([free[rank], *arrivals]) + duration(work)
    busy = sum(duration(work) for order in orders for work in order)
    return 1 - busy / (len(orders) * max(free))


def _needs(work: Pass) -> list[Pass]:
    """Return the passes that a pass waits for; some of them may not be scheduled."""
    if work.kind == "W":
        return [Pass("B", work.stage, work.microbatch)]
    if work.kind == "F":
        return [Pass("F", work.stage - 1, work.microbatch)]
    forward = Pass("F", work.stage, work.microbatch)
    behind = work.stage + 1
    return [forward, Pass("B", behind, work.microbatch), Pass("BW", behind, work.microbatch)]


def _ready(work: Pass, rank_of: dict[Pass, int], ends: dict[Pass, float]) -> bool:
    return all(need in ends for need in _needs(work) if need in rank_of)
