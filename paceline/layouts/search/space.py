"""Every layout that a model can be trained in on a number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from paceline.core.layout import Layout, Recompute, Schedule
from paceline.core.layout_sizes import layout_problems
from paceline.core.shape import Shape

Zero = Literal[0, 1, 2, 3]
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


def candidates(shape: Shape, devices: int, space: Space) -> Iterator[Layout]:
    """Every combination of axes whose replicas fill the devices, valid or not.

    Stages are those into which the layers, or the layers with embedding and head, can be cut;
    sequence parallelism goes with tensor parallelism, the interleaved schedule with several chunks.
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
        schedules = space.schedules if pp > 1 and vp == 1 else ("1f1b",)
        for micro, zero, recompute, schedule in product(
            space.micro_batches, space.zero_stages, space.recompute, schedules
        ):
            yield Layout(
                tp=tp,
                pp=pp,
                cp=cp,
                vp=vp,
                ep=ep,
                zero_stage=zero,
                micro_batch=micro,
                recompute=recompute,
                schedule=schedule,
                sequence_parallel=tp > 1 and shape.kind == "decoder",
            )


def feasible(
    shape: Shape, devices: int, global_batch: int, seq_len: int, space: Space
) -> tuple[list[Layout], int]:
    """The candidates that can run, and how many cannot."""
    layouts: list[Layout] = []
    refused = 0
    fits: dict[tuple[int | str, ...], bool] = {}
    for layout in candidates(shape, devices, space):
        # Whether sizes divide does not depend on recomputation, and rules on few of the axes.
        key = (
            layout.tp,
            layout.pp,
            layout.cp,
            layout.vp,
            layout.micro_batch,
            layout.zero_stage,
            layout.schedule,
            layout.ep,
        )
        if key not in fits:
            micro_batches = layout.num_microbatches(devices, global_batch)
            fits[key] = micro_batches <= MOST_MICRO_BATCHES and not layout_problems(
                layout, shape, devices, global_batch, seq_len
            )
        if fits[key]:
            layouts.append(layout)
        else:
            refused += 1
    return layouts, refused


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def _stages(shape: Shape, devices: int) -> list[tuple[int, int]]:
    """(pp, vp): the cuts of the layers, and of the layers with embedding and head."""
    if shape.kind != "decoder":
        return [(1, 1)]
    whole = {shape.num_layers, shape.num_layers + 2}
    cuts = {stages for layers in whole for stages in range(1, layers + 1) if layers % stages == 0}
    pairs = {
        (pp, stages // pp) for stages in cuts for pp in range(1, stages + 1) if stages % pp == 0
    }
    return sorted((pp, vp) for pp, vp in pairs if pp <= devices and (pp > 1 or vp == 1))
