"""Pipeline stages: their layers, their ranks and the rules of the schedules.

There are pp x vp stages; stage i is on rank i modulo pp.
"""

from __future__ import annotations

from itertools import accumulate


def stage_layers(num_layers: int, pp: int, vp: int, mtp_layers: int = 0) -> list[range]:
    """Return the layers of each of the pp x vp stages in order.

    Stages are equal if pp x vp divides the layers. Otherwise embedding and head count as one layer
    each, so the first and the last stage hold one layer less (as in Megatron's layout of the 126
    layers of Llama 3.1 405B). Where that does not divide evenly either, the layers of multi-token
    prediction count as well, which the last stage holds. Raise ValueError when nothing divides.
    """
    stages = pp * vp
    for at_first, at_last in ((0, 0), (1, 1), (1, 1 + mtp_layers)):
        size, remainder = divmod(num_layers + at_first + at_last, stages)
        if remainder == 0 and size >= at_last:
            sizes = [size] * stages
            sizes[0] -= at_first
            sizes[-1] -= at_last
            ends = accumulate(sizes)
            return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    all_layers = num_layers + 2 + mtp_layers
    mtp_note = f", or {all_layers} with multi-token prediction too" if mtp_layers else ""
    raise ValueError(
        f"pp {pp} x vp {vp} divides neither num_layers {num_layers} nor {num_layers + 2}, "
        f"the layers with embedding and head{mtp_note}; change pp or vp"
    )


def local_stages(rank: int, pp: int, vp: int) -> list[int]:
    """Return the stages on a rank of the pipeline axis in order."""
    return list(range(rank, pp * vp, pp))


def schedule_problems(schedule: str, pp: int, vp: int, num_microbatches: int) -> list[str]:
    """Return why a schedule cannot run this number of micro-batches; empty when it can.

    The rules are those of PyTorch 2.11 to 2.13 (torch.distributed.pipelining.schedules).
    """
    if pp == 1 or schedule == "gpipe" or (schedule == "1f1b" and vp == 1):
        return []
    rounds = max(1, num_microbatches // pp)
    if num_microbatches % rounds == 0:
        return []
    return [
        f"schedule {schedule} with pp {pp} cannot split {num_microbatches} micro-batches into "
        f"{rounds} equal rounds; use a multiple of {pp}"
    ]
