"""The weights that this rank's optimizer updates with ZeRO.

ZeRO 1: the weights are stored in flat buckets, and every rank updates an equal slice of each.
Slices are cut by elements, not by tensors, so they are equal for any number of ranks (Rajbhandari
et al., arXiv:1910.02054, section 5.1). Parameters are views of their buckets. The part of a
parameter in this rank's slice is a parameter of the optimizer, so moments exist for nothing else.
The optimizer's step starts with the gradients of these parts and ends with one all-gather per
bucket.

ZeRO 2 and 3: the optimizer updates this rank's shards as plain tensors. With DTensors PyTorch works
out a placement for every operation on a list of them, which takes seconds in the first step even
for a small model over three axes. AdamW is elementwise and needs none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist

from paceline.trainer.parallel.collectives import all_gather_into
from paceline.trainer.parallel.mesh import MeshAxis
from paceline.trainer.parallel.tensor import local

BUCKET_BYTES = 64 * 2**20
"""Minimum size of a full bucket."""
SLICE_BYTES = 2**20
"""Minimum size of a rank's slice of a bucket, so that messages are not small with many ranks."""
SLICE_ALIGNMENT = 32
"""Elements that divide every slice's length: 128 bytes of fp32, which suits NCCL."""


@dataclass(frozen=True, eq=False)
class WeightSlice:
    """Elements `begin` to `end` of a parameter in row-major order, which this rank updates."""

    begin: int
    end: int
    weight: nn.Parameter
    """A view of these elements that shares the parameter's memory."""


class WeightSlices:
    """This rank's slices of the trained weights, which it updates for all ranks of an axis."""

    def __init__(self, *groups: tuple[Iterable[nn.Parameter], MeshAxis]) -> None:
        """Move the values of (parameters, axis) into buckets; they are equal on the axis' ranks."""
        self.slices: dict[nn.Parameter, WeightSlice] = {}
        """Slice by parameter, without the parameters that other ranks update."""
        self._buckets: list[tuple[Tensor, Tensor, int, MeshAxis]] = []
        """(bucket, this rank's slice of it, number of weights in it, axis); padding follows the
        weights."""
        for parameters, axis in groups:
            for bucket in _buckets(parameters, max(BUCKET_BYTES, SLICE_BYTES * axis.size)):
                self._add(bucket, axis)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register step hooks that take the gradients before and gather the weights after it."""
        optimizer.register_step_pre_hook(lambda *_: self._take_gradients())
        optimizer.register_step_post_hook(lambda *_: self._gather())

    def _add(self, parameters: list[nn.Parameter], axis: MeshAxis) -> None:
        first, unit = parameters[0], axis.size * SLICE_ALIGNMENT
        num_weights = sum(parameter.numel() for parameter in parameters)
        flat = first.detach().new_zeros(-(-num_weights // unit) * unit)
        share = len(flat) // axis.size
        low = axis.index * share
        self._buckets.append((flat, flat[low : low + share], num_weights, axis))
        offset = 0
        for parameter in parameters:
            count = parameter.numel()
            view = flat[offset : offset + count].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            begin, end = max(0, low - offset), min(count, low + share - offset)
            if begin < end:
                weight = nn.Parameter(flat[offset + begin : offset + end])
                self.slices[parameter] = WeightSlice(begin, end, weight)
            offset += count

    def _take_gradients(self) -> None:
        for parameter, part in self.slices.items():
            assert parameter.grad is not None, "a missing gradient is reported before the step"
            part.weight.grad = parameter.grad.reshape(-1)[part.begin : part.end]

    def _gather(self) -> None:
        for part in self.slices.values():
            part.weight.grad = None
        works: list[dist.Work | None] = []
        for flat, own_slice, num_weights, axis in self._buckets:
            if axis.size == 1:
                continue
            if flat.is_cuda:
                all_gather_into(flat, own_slice, axis.group)
                continue
            # gloo's all-gather writes to a copy, which takes three times as long as broadcasts.
            for rank, part in zip(
                axis.ranks, flat[:num_weights].split(len(own_slice)), strict=False
            ):
                works.append(dist.broadcast(part, rank, axis.group, async_op=True))
        for work in works:
            assert work is not None, "the broadcast is asynchronous"
            work.wait()


def _buckets(parameters: Iterable[nn.Parameter], min_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Group consecutive parameters of one dtype until they have `min_bytes`."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (size >= min_bytes or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


class LocalShards:
    """This rank's shards of parameters, as plain tensors for an optimizer."""

    @torch.no_grad()
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.weights = {parameter: nn.Parameter(local(parameter)) for parameter in parameters}
        """Plain tensor by parameter, which shares the memory of this rank's shard."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register step hooks that set and drop the shards' gradients."""
        optimizer.register_step_pre_hook(lambda *_: self._take_gradients())
        optimizer.register_step_post_hook(lambda *_: self._drop_gradients())

    @torch.no_grad()
    def _take_gradients(self) -> None:
        for parameter, weight in self.weights.items():
            assert parameter.grad is not None, "a missing gradient is reported before the step"
            # FSDP may have moved the shard to pad it to an equal length.
            weight.data = local(parameter)
            weight.grad = local(parameter.grad)

    def _drop_gradients(self) -> None:
        for weight in self.weights.values():
            weight.grad = None
