"""ZeRO 1: the trained weights in flat buckets, of which every rank updates an equal slice.

Slices are cut by elements, not by tensors, so they are equal however many ranks there are
(Rajbhandari et al., arXiv:1910.02054, section 5.1). Parameters are views of their buckets; what a
slice holds of one is a parameter of the optimizer, which makes moments for nothing else. Its step
begins with the gradients of those pieces and ends with one exchange of each bucket.

ZeRO 2 and 3: the optimizer updates this rank's shards as plain tensors. Of DTensors PyTorch works
out, for every operation on a list of them, how each may lie on the mesh. The more axes, the longer:
seconds of the first step, of a small model over three axes as well. AdamW needs none of it, since
it treats every element alone.
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
"""Least size of a full bucket."""
SLICE_BYTES = 2**20
"""Least size of a rank's slice of one, so that many ranks exchange no small messages."""
ALIGNED = 32
"""Elements whose multiple every slice is long: 128 bytes of fp32, as NCCL likes them."""


@dataclass(frozen=True, eq=False)
class WeightPiece:
    """Elements `begin` to `end`, row by row, of a parameter that lie in this rank's slice."""

    begin: int
    end: int
    weight: nn.Parameter
    """The same memory as the parameter's."""


class WeightSlices:
    """This rank's slices of the trained weights, which it updates for all ranks of an axis."""

    def __init__(self, trained: Iterable[nn.Parameter], axis: MeshAxis) -> None:
        """Moves the parameters' values into buckets; all ranks must hold the same ones."""
        self.axis = axis
        self.pieces: dict[nn.Parameter, WeightPiece] = {}
        """None of a parameter that lies wholly in other ranks' slices."""
        self._buckets: list[tuple[Tensor, Tensor, int]] = []
        """Bucket, this rank's slice of it, and the elements that are weights: the rest fills up."""
        for parameters in _buckets(trained, max(BUCKET_BYTES, SLICE_BYTES * axis.size)):
            self._add(parameters)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer of the pieces their gradients, and all ranks the weights it makes."""
        optimizer.register_step_pre_hook(lambda *_: self._take_gradients())
        optimizer.register_step_post_hook(lambda *_: self._gather())

    def _add(self, parameters: list[nn.Parameter]) -> None:
        first, unit = parameters[0], self.axis.size * ALIGNED
        used = sum(parameter.numel() for parameter in parameters)
        flat = first.detach().new_zeros(-(-used // unit) * unit)
        share = len(flat) // self.axis.size
        low = self.axis.index * share
        self._buckets.append((flat, flat[low : low + share], used))
        offset = 0
        for parameter in parameters:
            count = parameter.numel()
            view = flat[offset : offset + count].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            begin, end = max(0, low - offset), min(count, low + share - offset)
            if begin < end:
                weight = nn.Parameter(flat[offset + begin : offset + end])
                self.pieces[parameter] = WeightPiece(begin, end, weight)
            offset += count

    def _take_gradients(self) -> None:
        for parameter, piece in self.pieces.items():
            assert parameter.grad is not None, "a missing gradient has been told already"
            piece.weight.grad = parameter.grad.reshape(-1)[piece.begin : piece.end]

    def _gather(self) -> None:
        for piece in self.pieces.values():
            piece.weight.grad = None
        works: list[dist.Work | None] = []
        for flat, mine, used in self._buckets:
            if flat.is_cuda:
                all_gather_into(flat, mine, self.axis.group)
                continue
            # gloo gathers into a copy, which takes three times as long as this.
            for rank, part in zip(self.axis.ranks, flat[:used].split(len(mine)), strict=False):
                works.append(dist.broadcast(part, rank, self.axis.group, async_op=True))
        for work in works:
            assert work is not None, "begun, not waited for"
            work.wait()


def _buckets(trained: Iterable[nn.Parameter], enough: int) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype in a row, until they have `enough` bytes."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in trained:
        if bucket and (size >= enough or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


class LocalShards:
    """What an optimizer updates in place of parameters that are spread over ranks."""

    @torch.no_grad()
    def __init__(self, trained: Iterable[nn.Parameter]) -> None:
        self.weights = {parameter: nn.Parameter(local(parameter)) for parameter in trained}
        """By parameter, the same memory as this rank's shard of it."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer of the shards their gradients."""
        optimizer.register_step_pre_hook(lambda *_: self._take_gradients())
        optimizer.register_step_post_hook(lambda *_: self._drop_gradients())

    @torch.no_grad()
    def _take_gradients(self) -> None:
        for parameter, weight in self.weights.items():
            assert parameter.grad is not None, "a missing gradient has been told already"
            # FSDP moves a shard to fill it up to an equal length: taken as it is now.
            weight.data = local(parameter)
            weight.grad = local(parameter.grad)

    def _drop_gradients(self) -> None:
        for weight in self.weights.values():
            weight.grad = None
