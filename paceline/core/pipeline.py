"""Pipeline parallelism: layers per stage, activations in flight, and the pipeline bubble.

The work of a micro-batch on a stage consists of a forward pass F, the gradient of the stage's input
B and the gradients of its weights W. All schedules except zero-bubble compute B and W together. The
closed forms hold for equal stages with F = B = W and communication that takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.layout import Layout, Schedule
from paceline.core.shape import Shape
from paceline.core.units import pluralize

PASSES = 3
"""Number of passes per micro-batch (F, B and W), which take equal time."""
IDLE_PASSES: dict[Schedule, int] = {"gpipe": 3, "1f1b": 3, "interleaved": 3, "zero-bubble": 1}
"""Contribution of each stage after the first to the bubble: F + B + W, or F + B - W with
zero-bubble."""


def counts_to_divide(num_layers: int, mtp_layers: int = 0) -> list[int]:
    """Return the counts of layers that stages may divide equally.

    These are the layers, the layers with embedding and head as one each, and the latter with the
    multi-token prediction layers, which come before the head. Megatron counts 126 + 2 for Llama 3.1
    405B and 61 + 1 + 2 for DeepSeek V3.
    """
    return sorted({num_layers, num_layers + 2, num_layers + mtp_layers + 2})


def layers_per_stage(shape: Shape, layout: Layout) -> list[int]:
    """Return `stage_sizes` of a model in a layout."""
    further = shape.mtp_layers if shape.kind == "decoder" else 0
    return stage_sizes(shape.num_layers, layout.pp, layout.vp, further)


def stage_sizes(num_layers: int, pp: int, vp: int, mtp_layers: int = 0) -> list[int]:
    """Return the number of layers of each of the pp x vp stages, in order.

    Stage i is on rank i mod pp. All stages are equal, or the first and the last one hold fewer
    layers, by the first of `counts_to_divide` that divides evenly. Multi-token prediction layers
    are on the last stage and not included. Raises ValueError if no count divides evenly or if they
    do not fit on the last stage.
    """
    stages = pp * vp
    if num_layers % stages == 0:
        return [num_layers // stages] * stages
    for further in dict.fromkeys((0, mtp_layers)):
        size, remainder = divmod(num_layers + further + 2, stages)
        if remainder == 0 and size > further:
            return [size - 1, *[size] * (stages - 2), size - 1 - further]
    raise ValueError(f"{pluralize(num_layers, 'layer')} cannot be split into {stages} stages")


def layers_in_flight(
    sizes: Sequence[int], pp: int, rank: int, schedule: Schedule, num_microbatches: int
) -> int:
    """Return layers x micro-batches that a rank holds when its first backward pass starts.

    It is the number of layers with activations in memory, counted once per micro-batch. `sizes`
    come from `stage_sizes`. GPipe keeps all of the m micro-batches. In the other schedules, a rank
    runs ahead by one micro-batch for each later rank. With interleaving it is two, plus whole
    rounds of all but one of v chunks. The result is min(m, p - r) for v = 1 and p + (p - 1) / v on
    the first rank of interleaved (Korthikanti et al., arXiv:2205.05198, section 4.2.3). As in
    PyTorch, a round has m // (m // p) micro-batches.
    """
    chunks = sizes[rank::pp]
    if schedule == "gpipe":
        return sum(chunks) * num_microbatches
    per_round = max(1, num_microbatches // max(1, num_microbatches // pp))
    ahead = (2 if schedule == "interleaved" else 1) * (pp - 1 - rank)
    passes = min(len(chunks) * num_microbatches, (len(chunks) - 1) * per_round + ahead + 1)
    return sum(chunks[i // per_round % len(chunks)] for i in range(passes))


def bubble_fraction(schedule: Schedule, pp: int, vp: int, num_microbatches: int) -> float:
    """Return the idle share of a rank's step, 0-1.

    The formula is I (p-1) / (3 v m + I (p-1)), with I from IDLE_PASSES. For gpipe, 1f1b and
    interleaved it is (p-1) / (v m + p-1). Sources: Huang et al., arXiv:1811.06965, section 2.3 for
    gpipe; Narayanan et al., arXiv:2104.04473, sections 2.2.1 and 2.2.2, who divide by the ideal
    step instead of the whole one; Lamy-Poirier, arXiv:2211.05953 for gpipe with v stages per rank.
    For zero-bubble it is ZB-H1 of Qi et al., arXiv:2401.10241, table 1, a third of the idle time of
    1f1b. With v stages per rank it is their ZB-1P, taken as 1/v of that.
    """
    idle = IDLE_PASSES[schedule] * (pp - 1)
    return idle / (PASSES * vp * num_microbatches + idle)
