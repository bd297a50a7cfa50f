"""Tensor parallelism: which parameter is cut along which dimension; the region between cuts.

Column-cut layers (q, k, v, up, gate) and the vocabulary keep whole inputs and parts of the outputs;
row-cut ones (o, down) take parts of the inputs, so their outputs must be summed. Norms, positions,
projections and the biases behind a sum are on every rank. An adapter is cut where its layer is: of
a column-cut layer the second matrix, of a row-cut one the first; its other matrix is on every rank,
which sees but a part of what its gradient is summed from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from paceline.trainer.parallel.collectives import (
    copy_to,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
)
from paceline.trainer.parallel.mesh import ALONE, Axis

OUTPUTS = (
    "q",
    "k",
    "v",
    "up",
    "gate",
    "embedding",
    "head",
    "qkv",
    "linear1",
    "modulation",
)
"""Layers whose weight and bias are cut along the first dimension."""
INPUTS = ("o", "down", "linear2")
"""Layers whose weight is cut along the second dimension."""
OF_HEADS = ("q_norm", "k_norm")
"""Uncut layers that a rank applies to its own heads alone."""


@dataclass(frozen=True)
class Region:
    """Where a replica's tensor ranks hold parts; `sequence` cuts the stream outside as well."""

    axis: Axis = ALONE
    sequence: bool = False

    def enter(self, x: Tensor) -> Tensor:
        """The stream (B, t, H) -> the whole (B, T, H), which every rank reads."""
        return gather_sequence(x, self.axis) if self.sequence else copy_to(x, self.axis)

    def leave(self, x: Tensor) -> Tensor:
        """Partial sums (B, T, H) -> the stream (B, t, H)."""
        return reduce_scatter_sequence(x, self.axis) if self.sequence else reduce_from(x, self.axis)

    def part(self, rows: Tensor) -> Tensor:
        """This rank's part of a per-token (T, ...) table for the stream."""
        return rows.chunk(self.axis.size)[self.axis.index] if self.sequence else rows


WHOLE = Region()


def cut_dim(name: str) -> int | None:
    """The dimension along which tensor ranks share a parameter, None when each has all of it."""
    *_, layer, kind = name.split(".")
    if layer in OUTPUTS:
        return None if kind == "lora_a" else 0
    return 1 if layer in INPUTS and kind in ("weight", "lora_a") else None


def is_share(name: str, sequence: bool) -> bool:
    """Whether a rank's gradient of an uncut parameter is only its share of a sum over the axis.

    Where the stream is cut along the sequence, every rank has seen its own tokens only.
    """
    layer, kind = name.split(".")[-2:]
    partial = sequence or kind in ("lora_a", "lora_b") or layer in OF_HEADS
    return cut_dim(name) is None and partial


def cut(name: str, whole: Tensor, axis: Axis) -> Tensor:
    """This rank's part of a whole parameter; raises ValueError when parts would differ in size."""
    dim = cut_dim(name)
    if dim is not None and whole.shape[dim] % axis.size:
        raise ValueError(f"{name}: tp {axis.size} does not divide {whole.shape[dim]}")
    return whole if dim is None else whole.chunk(axis.size, dim)[axis.index]


def placement(name: str) -> Placement:
    """How a parameter lies on the tensor axis."""
    dim = cut_dim(name)
    return Replicate() if dim is None else Shard(dim)


def cut_parameters(model: nn.Module, axis: Axis, mesh: DeviceMesh | None) -> None:
    """Replace parameters (on meta) by this rank's parts: DTensors over `mesh`, or plain ones."""
    if axis.size == 1:
        return
    for path, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = f"{path}.{key}"
            part = torch.empty_like(cut(name, parameter.detach(), axis))
            if mesh is not None:
                part = DTensor.from_local(part, mesh, [placement(name)], run_check=False)
            setattr(module, key, nn.Parameter(part, parameter.requires_grad))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the tensor itself; autograd follows it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
