"""Parallel layouts: how one model is spread over many devices, and which spreads are valid."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from paceline.core.shape import DecoderShape
from paceline.core.value import Value

Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


class Layout(Value):
    """Sizes of the parallel axes; data parallelism is what remains of the world."""

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    cp: PositiveInt = 1
    vp: PositiveInt = 1
    ep: PositiveInt = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    micro_batch: PositiveInt = 1
    recompute: Recompute = "none"
    schedule: Schedule = "1f1b"
    sequence_parallel: bool = False

    @property
    def model_devices(self) -> int:
        """Devices that hold one replica: tp x pp x cp."""
        return self.tp * self.pp * self.cp

    def dp(self, world_size: NonNegativeInt) -> int:
        """Data-parallel replicas in a world of `world_size` devices."""
        return world_size // self.model_devices

    def num_microbatches(self, world_size: int, global_batch: int) -> int:
        """Micro-batches that one replica runs per step (gradient accumulation)."""
        return global_batch // (self.dp(world_size) * self.micro_batch)

    def label(self, world_size: int) -> str:
        """The axes that are larger than one, in the field's order: `dp 4 tp 2 zero 3`."""
        sizes = {"dp": self.dp(world_size), "tp": self.tp, "pp": self.pp, "cp": self.cp,
                 "vp": self.vp, "ep": self.ep, "zero": self.zero_stage}  # fmt: skip
        floor = {"zero": 0}
        return " ".join(f"{k} {v}" for k, v in sizes.items() if k == "dp" or v > floor.get(k, 1))


def layout_problems(
    layout: Layout, shape: DecoderShape, world_size: int, global_batch: int
) -> list[str]:
    """Why this layout cannot run, one sentence each; empty when it can.

    These rules follow from arithmetic alone; what a trainer supports is the trainer's to say.
    """
    problems: list[str] = []
    if world_size % layout.model_devices:
        problems.append(
            f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {layout.model_devices} "
            f"does not divide {world_size} devices"
        )
        return problems
    batch = layout.dp(world_size) * layout.micro_batch
    if global_batch % batch:
        problems.append(
            f"global_batch {global_batch} is not a multiple of "
            f"dp {layout.dp(world_size)} x micro_batch {layout.micro_batch} = {batch}"
        )
    if shape.kv_heads % layout.tp:
        problems.append(f"tp {layout.tp} does not divide {shape.kv_heads} key/value heads")
    stages = layout.pp * layout.vp
    if shape.num_layers % stages and (shape.num_layers + 2) % stages:
        # Megatron may count embedding and head as a layer each: 126 + 2 for Llama 3.1 405B.
        problems.append(
            f"pp {layout.pp} x vp {layout.vp} divides neither {shape.num_layers} layers "
            f"nor {shape.num_layers + 2} with embedding and head"
        )
    if layout.vp > 1 and layout.pp == 1:
        problems.append(f"vp {layout.vp} needs pp > 1")
    if layout.sequence_parallel and layout.tp == 1:
        problems.append("sequence_parallel needs tp > 1")
    return problems
