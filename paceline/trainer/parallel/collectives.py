"""Sums and gathers over an axis that autograd sees, and flat sums of many tensors.

A tensor-parallel region begins with `copy_to` or `gather_sequence` and ends with `reduce_from` or
`reduce_scatter_sequence`; in the backward pass each is the other of its pair (Shoeybi et al.,
arXiv:1909.08053, section 3; Korthikanti et al., arXiv:2205.05198, section 4.2). To torch.compile
every exchange is an operator, which does not end a graph. It is waited for at once: no tensor still
on its way enters a compiled block, where its gradient would be lost without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from paceline.trainer.parallel.mesh import MeshAxis

BUCKET_BYTES = 64 * 2**20
"""Most that is made flat at a time."""

# PyTorch 2.13 renamed these and warns about the old names; 2.11 has only those.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Group = dist.ProcessGroup | None


def all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """The sum of a contiguous tensor over the axis, in place."""
    if axis.size > 1:
        _wait(dist.all_reduce(x, group=axis.group, async_op=True))
    return x


def copy_to(x: Tensor, axis: MeshAxis) -> Tensor:
    """x itself; its gradient is summed over the axis."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from(x: Tensor, axis: MeshAxis) -> Tensor:
    """The sum of x over the axis, written over x, which nobody else may need."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather_sequence(x: Tensor, axis: MeshAxis) -> Tensor:
    """(B, T, ...) of every rank -> (B, n T, ...) in axis order; gradients are summed and cut."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)


def reduce_scatter_sequence(x: Tensor, axis: MeshAxis) -> Tensor:
    """(B, n T, ...) -> this rank's (B, T, ...) of the sum over the axis."""
    return x if axis.size == 1 else _ReduceScatterSequence.apply(x, axis)


def gather_features(x: Tensor, axis: MeshAxis) -> Tensor:
    """(B, F) of every rank -> (B, n F) in the axis' order, for what all ranks then do alike.

    All of them have the same gradient, of which each takes its part.
    """
    return x if axis.size == 1 else _GatherFeatures.apply(x, axis)


def all_reduce_coalesced(tensors: Iterable[Tensor], axis: MeshAxis, factor: float = 1.0) -> None:
    """`factor` x the sum of many tensors over the axis, in place, in few large pieces."""
    if axis.size == 1:
        return
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        all_reduce(flat, axis).mul_(factor)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket


def _wait(work: dist.Work | None) -> None:
    """Asynchronous and waited for at once: the step's clock sees only such waits."""
    assert work is not None
    work.wait()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        # A copy, because autograd may hand the same tensor to another branch.
        return all_reduced(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        return all_reduced(x.contiguous(), axis).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return _all_gathered(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _reduce_scattered(grad, ctx.axis), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return _reduce_scattered(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_gathered(grad, ctx.axis), None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return all_gathered(x, axis).unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.chunk(ctx.axis.size, dim=1)[ctx.axis.index].contiguous(), None


def all_reduced(x: Tensor, axis: MeshAxis) -> Tensor:
    """The sum of a contiguous tensor over the axis; written over it, unless that is traced."""
    if not torch.compiler.is_compiling():
        return all_reduce(x, axis)
    out = x.clone()
    operators.all_reduce_(out, axis.name)
    return out


def all_gathered(x: Tensor, axis: MeshAxis) -> Tensor:
    """(n, ...) of every rank -> (size x n, ...)."""
    if torch.compiler.is_compiling():
        return operators.all_gather(x, axis.size, axis.name)
    return all_gather_into(_times(x, axis.size), x.contiguous(), axis.group)


def reduce_scattered(x: Tensor, axis: MeshAxis) -> Tensor:
    """(size x n, ...) -> this rank's (n, ...) of the sum over the axis."""
    if torch.compiler.is_compiling():
        return operators.reduce_scatter(x, axis.size, axis.name)
    return reduce_scatter_into(_share(x, axis.size), x.contiguous(), axis.group)


def _all_gathered(x: Tensor, axis: MeshAxis) -> Tensor:
    """Collectives join along the first dimension; the sequence is the second."""
    return all_gathered(x, axis).unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1, 2)


def _reduce_scattered(x: Tensor, axis: MeshAxis) -> Tensor:
    return reduce_scattered(x.unflatten(1, (axis.size, -1)).transpose(0, 1).flatten(0, 1), axis)


def all_gather_into(out: Tensor, x: Tensor, group: Group) -> Tensor:
    """`out` (size x n, ...) filled with every rank's `x` (n, ...)."""
    return _settle(_gather_single(out, x, group=group, async_op=True), out)


def reduce_scatter_into(out: Tensor, x: Tensor, group: Group) -> Tensor:
    """`out` (n, ...) filled with this rank's part of the sum of all ranks' `x` (size x n, ...)."""
    return _settle(_scatter_single(out, x, group=group, async_op=True), out)


def all_to_all_into(out: Tensor, x: Tensor, group: Group) -> Tensor:
    """`out` (size x n, ...) whose part i is the part for this rank in `x` of rank i."""
    return _settle(dist.all_to_all_single(out, x, group=group, async_op=True), out)


def send_recv_ring(
    out: Tensor, x: Tensor, ranks: tuple[int, ...], index: int, group: Group
) -> list[Any]:
    """Begin to send `x` to the next rank of a ring and to receive `out`; works to wait for."""
    to_next = dist.P2POp(dist.isend, x, ranks[(index + 1) % len(ranks)], group)
    from_last = dist.P2POp(dist.irecv, out, ranks[index - 1], group)
    return dist.batch_isend_irecv([to_next, from_last])


def _settle(work: Any, out: Tensor) -> Tensor:
    """`out`, once the work that fills it is done (on CUDA: before the stream's next kernel)."""
    work.wait()
    return out


def _times(x: Tensor, size: int) -> Tensor:
    """Room for (size x n, ...) beside x (n, ...)."""
    return x.new_empty(size * x.shape[0], *x.shape[1:])


def _share(x: Tensor, size: int) -> Tensor:
    """Room for (n, ...) beside x (size x n, ...)."""
    return x.new_empty(x.shape[0] // size, *x.shape[1:])


def _operators() -> Any:
    """What is exchanged, as operators for the compiler; each does what runs without it.

    PyTorch's functional collectives wait in C++, where neither the step's clock nor the count of
    the traffic sees them.
    """

    def all_reduce_(x: Tensor, group: str) -> None:
        _wait(dist.all_reduce(x, group=_group(group), async_op=True))

    def all_gather(x: Tensor, size: int, group: str) -> Tensor:
        return all_gather_into(_times(x, size), x.contiguous(), _group(group))

    def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
        return reduce_scatter_into(_share(x, size), x.contiguous(), _group(group))

    kernels: dict[str, tuple[Any, Any]] = {
        "all_reduce_(Tensor(a!) x, str group) -> ()": (all_reduce_, lambda *_: None),
        "all_gather(Tensor x, int size, str group) -> Tensor": (
            all_gather,
            lambda x, size, _: _times(x, size),
        ),
        "reduce_scatter(Tensor x, int size, str group) -> Tensor": (
            reduce_scatter,
            lambda x, size, _: _share(x, size),
        ),
    }
    for schema, (kernel, shaped) in kernels.items():
        name = LIBRARY.define(schema)
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        LIBRARY.impl(name, shaped, "Meta")
    return torch.ops.paceline


def _group(name: str) -> Group:
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group(name)


LIBRARY = torch.library.Library("paceline", "FRAGMENT")
operators = _operators()
