"""Every layout that a model can be trained in on a number of devices."""

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
VARIED = {"micro_batch", "zero_stage", "schedule", "recompute"}
"""Fields of a layout that do not decide how a model is cut."""
MOST_MICRO_BATCHES = 4096
"""Beyond it a step of micro-batches as small as this is never the fastest."""


@dataclass(frozen=True)
class Space:
    """What a search may vary; axes are powers of two up to a bound."""

    most_tp: int = 8
    """Tensor parallelism inside the fast domain, the usual bound."""
    most_cp: int = 16
    most_ep: int = 64
    """Of models with experts."""
    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    zero_stages: tuple[Zero, ...] = (0, 1, 2, 3)
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    schedules: tuple[Schedule, ...] = ("1f1b",)
    """Of pipelines with one chunk a rank; with several chunks 1f1b, which is then interleaved."""

    def around(self, layout: Layout) -> Space:
        """The space with the micro-batch of a layout, so that what is next to it can be found."""
        return replace(self, micro_batches=tuple(sorted({*self.micro_batches, layout.micro_batch})))


def replica_layouts(shape: Shape, devices: int, space: Space) -> Iterator[Layout]:
    """Every way to cut a model whose replicas fill the devices, valid or not, all else plain.

    Stages are those of `counts_to_divide`; sequence parallelism goes with tensor parallelism.
    """
    experts = shape.num_experts if shape.kind == "decoder" else 1
    axes = product(
        _powers(space.most_tp),
        _stages(shape, devices),
        _powers(space.most_cp),
        _powers(min(space.most_ep, experts)),
    )
    for tp, (pp, vp), cp, ep in axes:
        if devices % (tp * pp * cp):
            continue
        sequence = tp > 1 and shape.kind == "decoder"
        yield Layout(tp=tp, pp=pp, cp=cp, vp=vp, ep=ep, sequence_parallel=sequence)


def feasible(
    shape: Shape, devices: int, global_batch: int, seq_len: int, space: Space
) -> tuple[list[Layout], int]:
    """The candidates that can run, and how many cannot.

    What is refused with one sample, without ZeRO and in the default schedule is refused with more
    of them, so that most of a large space is never looked at.
    """

    def problems(layout: Layout) -> list[str]:
        return layout_problems(ParallelRun(layout, shape, devices, global_batch, seq_len))

    layouts: list[Layout] = []
    seen = 0
    for plain in replica_layouts(shape, devices, space):
        piped = plain.pp > 1 and plain.vp == 1
        schedules: tuple[Schedule, ...] = space.schedules if piped else ("1f1b",)
        ways = list(product(space.micro_batches, space.zero_stages))
        seen += len(ways) * len(schedules) * len(space.recompute)
        if problems(plain):
            continue
        axes = plain.model_dump(exclude=VARIED)
        for micro, zero in ways:
            sized = [
                Layout(**axes, micro_batch=micro, zero_stage=zero, schedule=schedule)
                for schedule in schedules
            ]
            # Whether sizes divide does not depend on recomputation.
            running: list[Schedule] = [
                layout.schedule
                for layout in sized
                if layout.num_microbatches(devices, global_batch) <= MOST_MICRO_BATCHES
                and not problems(layout)
            ]
            layouts += [
                Layout(**axes, micro_batch=micro, zero_stage=zero, recompute=kind, schedule=order)
                for kind, order in product(space.recompute, running)
            ]
    return layouts, seen - len(layouts)


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def _stages(shape: Shape, devices: int) -> list[tuple[int, int]]:
    """(pp, vp): the cuts of the layers, and of the layers with what lies beside them."""
    if shape.kind != "decoder":
        return [(1, 1)]
    whole = counts_to_divide(shape.num_layers, shape.mtp_layers)
    cuts = {stages for layers in whole for stages in range(1, layers + 1) if layers % stages == 0}
    pairs = {
        (pp, stages // pp) for stages in cuts for pp in range(1, stages + 1) if stages % pp == 0
    }
    return sorted((pp, vp) for pp, vp in pairs if pp <= devices and (pp > 1 or vp == 1))
