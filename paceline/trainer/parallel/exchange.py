"""Collectives that return when their result may be used, under names that every PyTorch has.

PyTorch 2.13 renamed two of them and warns about the old names; 2.11 has only those. Tensors are
contiguous, ranks follow each other along the first dimension.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch import distributed as dist

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = dist.ProcessGroup | None


def gather_into(out: Tensor, x: Tensor, group: Group) -> Tensor:
    """`out` (size x n, ...) filled with every rank's `x` (n, ...)."""
    return _settle(_gather(out, x, group=group, async_op=True), out)


def scatter_sum_into(out: Tensor, x: Tensor, group: Group) -> Tensor:
    """`out` (n, ...) filled with this rank's part of the sum of all ranks' `x` (size x n, ...)."""
    return _settle(_scatter_sum(out, x, group=group, async_op=True), out)


def all_to_all_into(out: Tensor, x: Tensor, group: Group) -> Tensor:
    """`out` (size x n, ...) whose part i is the part for this rank in `x` of rank i."""
    return _settle(dist.all_to_all_single(out, x, group=group, async_op=True), out)


def pass_on(out: Tensor, x: Tensor, ranks: tuple[int, ...], index: int, group: Group) -> list[Any]:
    """Begin to send `x` to the next rank of a ring and to receive `out`; works to wait for."""
    to_next = dist.P2POp(dist.isend, x, ranks[(index + 1) % len(ranks)], group)
    from_last = dist.P2POp(dist.irecv, out, ranks[index - 1], group)
    return dist.batch_isend_irecv([to_next, from_last])


def _settle(work: Any, out: Tensor) -> Tensor:
    """`out`, once the work that fills it is done (on CUDA: before the stream's next kernel)."""
    work.wait()
    return out
