"""How layers are cut into pipeline stages, where the stages lie, and what a schedule demands.

The pp x vp stages follow each other around the pipeline's ranks: stage i lies on rank i modulo pp.
"""

from __future__ import annotations

from paceline.trainer.wording import counted


def stage_layers(num_layers: int, pp: int, vp: int) -> list[range]:
    """The layers of each of the pp x vp stages, the first stage's first.

    Stages are equal, or, where that does not come out even, embedding and head count as a layer
    each: the first and the last stage then hold one layer less (Megatron does so for the 126 layers
    of Llama 3.1 405B). Raises ValueError when neither comes out even.
    """
    stages = pp * vp
    if num_layers % stages == 0:
        sizes = [num_layers // stages] * stages
    elif (num_layers + 2) % stages == 0:
        sizes = [(num_layers + 2) // stages] * stages
        sizes[0] -= 1
        sizes[-1] -= 1
    else:
        raise ValueError(
            f"pp {pp} x vp {vp} divides neither {counted(num_layers, 'layer')} "
            f"nor {num_layers + 2} with embedding and head"
        )
    ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def stages_of(rank: int, pp: int, vp: int) -> list[int]:
    """The stages on a rank of the pipeline axis, the first one first."""
    return list(range(rank, pp * vp, pp))


def schedule_problems(schedule: str, pp: int, vp: int, num_microbatches: int) -> list[str]:
    """Why a schedule cannot run so many micro-batches, one sentence each; empty when it can.

    The rules are those of PyTorch 2.11 to 2.13 (torch.distributed.pipelining.schedules).
    """
    if pp == 1 or schedule == "gpipe" or (schedule == "1f1b" and vp == 1):
        return []
    rounds = max(1, num_microbatches // pp)
    if num_microbatches % rounds == 0:
        return []
    batches, times = counted(num_microbatches, "micro-batch", "es"), counted(rounds, "round")
    return [
        f"{schedule} over pp {pp} runs {batches} in {times}, which does not come out even; "
        f"a multiple of {pp} always does"
    ]
