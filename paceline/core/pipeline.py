"""Pipelines: layers of each stage, what a rank keeps, and the share of a step in which it waits.

A micro-batch's work on a stage is a forward pass F, the gradient of the stage's input B, and the
gradients of its weights W; all but the zero-bubble schedules do B and W in one. The closed forms
hold for equal stages with F = B = W and exchanges that take no time; `idle_fraction` follows any
order of passes with any durations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core.layout import Layout, Schedule
from paceline.core.shape import Shape
from paceline.core.units import counted

PASSES = 3
"""F, B and W of one micro-batch, each as long as the others."""
IDLE_PASSES: dict[Schedule, int] = {"gpipe": 3, "1f1b": 3, "interleaved": 3, "zero-bubble": 1}
"""What each stage after the first adds to the bubble: F + B + W, or F + B - W with zero-bubble."""


def counts_to_divide(num_layers: int, mtp_layers: int = 0) -> list[int]:
    """What stages may share equally: the layers, these with embedding and head counted as one each,
    and these with the layers that predict further tokens, which lie before the head.

    Megatron counts 126 + 2 for Llama 3.1 405B, 61 + 1 + 2 for DeepSeek V3.
    """
    return sorted({num_layers, num_layers + 2, num_layers + mtp_layers + 2})


def layers_per_stage(shape: Shape, layout: Layout) -> list[int]:
    """`stage_sizes` of a model in a layout."""
    further = shape.mtp_layers if shape.kind == "decoder" else 0
    return stage_sizes(shape.num_layers, layout.pp, layout.vp, further)


def stage_sizes(num_layers: int, pp: int, vp: int, mtp_layers: int = 0) -> list[int]:
    """Layers of each of the pp x vp stages, the first stage's first; stage i lies on rank i mod pp.

    All equal, or the ends hold less, by the first of `counts_to_divide` that comes out even; layers
    for further tokens, all of the last stage, are not among the result. Raises ValueError when none
    does, or the last stage has no room for them.
    """
    stages = pp * vp
    if num_layers % stages == 0:
        return [num_layers // stages] * stages
    for further in dict.fromkeys((0, mtp_layers)):
        size, rest = divmod(num_layers + further + 2, stages)
        if rest == 0 and size > further:
            return [size - 1, *[size] * (stages - 2), size - 1 - further]
    raise ValueError(f"{counted(num_layers, 'layer')} cannot be split into {stages} stages")


def layers_in_flight(
    sizes: Sequence[int], pp: int, rank: int, schedule: Schedule, num_microbatches: int
) -> int:
    """Layers x micro-batches whose activations a rank holds when its first backward pass begins.

    `sizes` as from `stage_sizes`. Of m micro-batches gpipe keeps all. The others run ahead by one
    for each rank behind, interleaved by two, and by whole rounds of all but one of v chunks:
    min(m, p - r) for v = 1, p + (p - 1) / v on the first rank of interleaved (Korthikanti et al.,
    arXiv:2205.05198, section 4.2.3). Rounds as in PyTorch: m // (m // p) micro-batches.
    """
    chunks = sizes[rank::pp]
    if schedule == "gpipe":
        return sum(chunks) * num_microbatches
    per_round = max(1, num_microbatches // max(1, num_microbatches // pp))
    ahead = (2 if schedule == "interleaved" else 1) * (pp - 1 - rank)
    passes = min(len(chunks) * num_microbatches, (len(chunks) - 1) * per_round + ahead + 1)
    return sum(chunks[i // per_round % len(chunks)] for i in range(passes))


def bubble_fraction(schedule: Schedule, pp: int, vp: int, num_microbatches: int) -> float:
    """Idle share of a rank's step, 0-1: I (p-1) / (3 v m + I (p-1)), I as in IDLE_PASSES.

    gpipe, 1f1b and interleaved: (p-1) / (v m + p-1). Huang et al., arXiv:1811.06965, section 2.3
    for gpipe; Narayanan et al., arXiv:2104.04473, sections 2.2.1 and 2.2.2, who divide by the ideal
    step and not by the whole one; gpipe over v stages a rank as Lamy-Poirier, arXiv:2211.05953.
    zero-bubble: ZB-H1 of Qi et al., arXiv:2401.10241, table 1, a third of 1f1b's idle time; over
    v stages a rank their ZB-1P, taken as a v-th of that.
    """
    idle = IDLE_PASSES[schedule] * (pp - 1)
    return idle / (PASSES * vp * num_microbatches + idle)


@dataclass(frozen=True)
class Pass:
    """One stretch of a stage's work for a micro-batch; BW is a whole backward pass."""

    kind: Literal["F", "B", "W", "BW"]
    stage: int
    microbatch: int


def idle_fraction(orders: Sequence[Sequence[Pass]], duration: Callable[[Pass], float]) -> float:
    """Mean idle share of the ranks, 0-1, when each does its passes in the given order.

    F waits for F of the stage before, B for B of the stage behind; exchanges take no time. Raises
    ValueError when the orders wait for each other in a circle.
    """
    rank_of = {p: rank for rank, order in enumerate(orders) for p in order}
    ends: dict[Pass, float] = {}
    free = [0.0] * len(orders)
    left = [list(reversed(order)) for order in orders]
    while any(left):
        ready = [rank for rank, rest in enumerate(left) if rest and _ready(rest[-1], rank_of, ends)]
        if not ready:
            raise ValueError("the orders of passes wait for each other in a circle")
        for rank in ready:
            work = left[rank].pop()
            arrivals = (ends[need] for need in _needs(work) if need in rank_of)
            free[rank] = ends[work] = max([free[rank], *arrivals]) + duration(work)
    busy = sum(duration(work) for order in orders for work in order)
    return 1 - busy / (len(orders) * max(free))


def _needs(work: Pass) -> list[Pass]:
    """What must be done before a pass, as far as it is done at all."""
    if work.kind == "W":
        return [Pass("B", work.stage, work.microbatch)]
    if work.kind == "F":
        return [Pass("F", work.stage - 1, work.microbatch)]
    forward = Pass("F", work.stage, work.microbatch)
    behind = work.stage + 1
    return [forward, Pass("B", behind, work.microbatch), Pass("BW", behind, work.microbatch)]


def _ready(work: Pass, rank_of: dict[Pass, int], ends: dict[Pass, float]) -> bool:
    return all(need in ends for need in _needs(work) if need in rank_of)
