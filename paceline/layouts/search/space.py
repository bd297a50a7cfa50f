"""List every layout in which a model can be trained on a number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from paceline.core.layout import Layout, Recompute, Schedule
from paceline.core.layout_checks import layout_problems
from paceline.core.parallel_run import ParallelRun
from paceline.core.pipeline import counts_to_divide
from paceline.core.shape import Shape

Zero = Literal[0, 1, 2, 3]
NON_SPLIT_FIELDS = {"micro_batch", "zero_stage", "schedule", "recompute"}
"""Layout fields that do not affect how the model is split."""
MAX_MICRO_BATCHES = 4096
"""More micro-batches per step are never the fastest."""


@dataclass(frozen=True)
class SearchSpace:
    """Ranges of a search; axes are powers of two up to a maximum."""

    max_tp: int = 8
    """Tensor parallelism stays inside the NVLink domain."""
    max_cp: int = 16
    max_ep: int = 64
    """Applies to models with experts."""
    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    zero_stages: tuple[Zero, ...] = (0, 1, 2, 3)
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    schedules: tuple[Schedule, ...] = ("1f1b",)
    """Schedules with one chunk per rank; several chunks always use interleaved 1F1B."""

    def around(self, layout: Layout) -> SearchSpace:
        """Return the space including the micro-batch of a layout."""
        return replace(self, micro_batches=tuple(sorted({*self.micro_batches, layout.micro_batch})))


def replica_layouts(shape: Shape, devices: int, space: SearchSpace) -> Iterator[Layout]:
    """Yield every split of a model whose replicas fill the devices, valid or not.

    Stages are those of `counts_to_divide`. Sequence parallelism is on with tensor parallelism.
    """
    experts = shape.num_experts if shape.kind == "decoder" else 1
    axes = product(
        _powers(space.max_tp),
        _stages(shape, devices),
        _powers(space.max_cp),
        _powers(min(space.max_ep, experts)),
    )
    for tp, (pp, vp), cp, ep in axes:
        if devices % (tp * pp * cp):
            continue
        sequence = tp > 1 and shape.kind == "decoder"
        yield Layout(tp=tp, pp=pp, cp=cp, vp=vp, ep=ep, sequence_parallel=sequence)


def feasible_layouts(
    shape: Shape, devices: int, global_batch: int, seq_len: int, space: SearchSpace
) -> tuple[list[Layout], int]:
    """Return the layouts that can run, and the number that cannot.

    A split that is invalid with micro-batch 1, no ZeRO and the default schedule is invalid with any
    other, so most of a large space is never enumerated.
    """

    def problems(layout: Layout) -> list[str]:
        return layout_problems(ParallelRun(layout, shape, devices, global_batch, seq_len))

    layouts: list[Layout] = []
    num_candidates = 0
    for plain in replica_layouts(shape, devices, space):
        is_pipelined = plain.pp > 1 and plain.vp == 1
        schedules: tuple[Schedule, ...] = space.schedules if is_pipelined else ("1f1b",)
        ways = list(product(space.micro_batches, space.zero_stages))
        num_candidates += len(ways) * len(schedules) * len(space.recompute)
        if problems(plain):
            continue
        axes = plain.model_dump(exclude=NON_SPLIT_FIELDS)
        for micro, zero in ways:
            layouts_by_schedule = [
                Layout(**axes, micro_batch=micro, zero_stage=zero, schedule=schedule)
                for schedule in schedules
            ]
            # Whether sizes divide does not depend on recomputation.
            running: list[Schedule] = [
                layout.schedule
                for layout in layouts_by_schedule
                if layout.num_microbatches(devices, global_batch) <= MAX_MICRO_BATCHES
                and not problems(layout)
            ]
            layouts += [
                Layout(**axes, micro_batch=micro, zero_stage=zero, recompute=kind, schedule=order)
                for kind, order in product(space.recompute, running)
            ]
    return layouts, num_candidates - len(layouts)


def _powers(limit: int) -> list[int]:
    return [2**n for n in range(limit.bit_length()) if 2**n <= limit]


def _stages(shape: Shape, devices: int) -> list[tuple[int, int]]:
    """Return (pp, vp) for every split of the layers, with and without embedding and head."""
    if shape.kind != "decoder":
        return [(1, 1)]
    layer_counts = counts_to_divide(shape.num_layers, shape.mtp_layers)
    stage_counts = {
        stages for layers in layer_counts for stages in range(1, layers + 1) if layers % stages == 0
    }
    pairs = {
        (pp, stages // pp)
        for stages in stage_counts
        for pp in range(1, stages + 1)
        if stages % pp == 0
    }
    return sorted((pp, vp) for pp, vp in pairs if pp <= devices and (pp > 1 or vp == 1))
