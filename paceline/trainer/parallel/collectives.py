"""Differentiable collectives over an axis, and coalesced sums of many tensors.

A tensor-parallel region starts with `copy_to` or `gather_sequence` and ends with `reduce_from` or
`reduce_scatter_sequence`; in the backward pass each becomes the other of its pair (Shoeybi et al.,
arXiv:1909.08053, section 3; Korthikanti et al., arXiv:2205.05198, section 4.2).

For torch.compile every collective is a custom operator, which does not break the graph. It waits
for its result, because a pending tensor in a compiled block would silently lose its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from paceline.trainer.parallel.mesh import MeshAxis

BUCKET_BYTES = 64 * 2**20
"""Maximum size of a flat bucket."""

# PyTorch 2.13 renamed these functions and warns about the old names, the only ones in 2.11.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Group = dist.ProcessGroup | None


def all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """Sum a contiguous tensor over the axis in place."""
    if axis.size > 1:
        _wait(dist.all_reduce(x, group=axis.group, async_op=True))
    return x


def copy_to(x: Tensor, axis: MeshAxis) -> Tensor:
    """Return x; its gradient is summed over the axis."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from(x: Tensor, axis: MeshAxis) -> Tensor:
    """Sum x over the axis in place; x must not be used elsewhere."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather_sequence(x: Tensor, axis: MeshAxis) -> Tensor:
    """Gather (B, T, ...) to (B, n T, ...) in axis order; gradients are reduce-scattered."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)


def reduce_scatter_sequence(x: Tensor, axis: MeshAxis) -> Tensor:
    """Sum (B, n T, ...) over the axis and return this rank's (B, T, ...)."""
    return x if axis.size == 1 else _ReduceScatterSequence.apply(x, axis)


def gather_features(x: Tensor, axis: MeshAxis) -> Tensor:
    """Gather (B, F) to (B, n F) in axis order, for computation that is equal on all ranks.

    Since the gradients are equal, each rank takes its own part of them.
    """
    return x if axis.size == 1 else _GatherFeatures.apply(x, axis)


def all_reduce_coalesced(tensors: Iterable[Tensor], axis: MeshAxis, factor: float = 1.0) -> None:
    """Replace tensors by `factor` x their sum over the axis, in a few large buckets."""
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
    """Wait for an asynchronous collective; the step's clock measures only such waits."""
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
        return traced_all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        return traced_all_reduce(x.contiguous(), axis).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return _gather_dim1(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _reduce_scatter_dim1(grad, ctx.axis), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return _reduce_scatter_dim1(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gather_dim1(grad, ctx.axis), None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis).unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.chunk(ctx.axis.size, dim=1)[ctx.axis.index].contiguous(), None


def traced_all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """Sum a contiguous tensor over the axis, in place unless torch.compile traces it."""
    if not torch.compiler.is_compiling():
        return all_reduce(x, axis)
    out = x.clone()
    operators.all_reduce_(out, axis.name)
    return out


def all_gather(x: Tensor, axis: MeshAxis) -> Tensor:
    """Gather (n, ...) of every rank to (size x n, ...)."""
    if torch.compiler.is_compiling():
        return operators.all_gather(x, axis.size, axis.name)
    return all_gather_into(_empty_gathered(x, axis.size), x.contiguous(), axis.group)


def reduce_scatter(x: Tensor, axis: MeshAxis) -> Tensor:
    """Sum (size x n, ...) over the axis and return this rank's (n, ...)."""
    if torch.compiler.is_compiling():
        return operators.reduce_scatter(x, axis.size, axis.name)
    return reduce_scatter_into(_empty_scattered(x, axis.size), x.contiguous(), axis.group)


def _gather_dim1(x: Tensor, axis: MeshAxis) -> Tensor:
    """Gather along the second dimension; collectives concatenate along the first."""
    return all_gather(x, axis).unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1, 2)


def _reduce_scatter_dim1(x: Tensor, axis: MeshAxis) -> Tensor:
    return reduce_scatter(x.unflatten(1, (axis.size, -1)).transpose(0, 1).flatten(0, 1), axis)


def all_gather_into(out: Tensor, x: Tensor, group: Group) -> Tensor:
    """Fill `out` (size x n, ...) with every rank's `x` (n, ...)."""
    return _wait_for(_gather_single(out, x, group=group, async_op=True), out)


def reduce_scatter_into(out: Tensor, x: Tensor, group: Group) -> Tensor:
    """Fill `out` (n, ...) with this rank's part of the sum of all ranks' `x` (size x n, ...)."""
    return _wait_for(_scatter_single(out, x, group=group, async_op=True), out)


def all_to_all_into(
    out: Tensor,
    x: Tensor,
    group: Group,
    out_rows: list[int] | None = None,
    x_rows: list[int] | None = None,
) -> Tensor:
    """Fill part i of `out` (size x n, ...) with rank i's part of `x` for this rank.

    `out_rows` and `x_rows` are the rows of each part; None for equal parts.
    """
    work = dist.all_to_all_single(out, x, out_rows, x_rows, group=group, async_op=True)
    return _wait_for(work, out)


def send_recv_ring(
    out: Tensor, x: Tensor, ranks: tuple[int, ...], index: int, group: Group
) -> list[Any]:
    """Start sending `x` to the next rank of a ring and receiving `out`; return the works."""
    to_next = dist.P2POp(dist.isend, x, ranks[(index + 1) % len(ranks)], group)
    from_previous = dist.P2POp(dist.irecv, out, ranks[index - 1], group)
    return dist.batch_isend_irecv([to_next, from_previous])


def _wait_for(work: Any, out: Tensor) -> Tensor:
    """Return `out` when the work is done (on CUDA: before the stream's next kernel)."""
    work.wait()
    return out


def _empty_gathered(x: Tensor, size: int) -> Tensor:
    """Return an empty (size x n, ...) for x (n, ...)."""
    return x.new_empty(size * x.shape[0], *x.shape[1:])


def _empty_scattered(x: Tensor, size: int) -> Tensor:
    """Return an empty (n, ...) for x (size x n, ...)."""
    return x.new_empty(x.shape[0] // size, *x.shape[1:])


def _register_operators() -> Any:
    """Register the collectives as operators for torch.compile.

    PyTorch's functional collectives wait in C++, where neither the step's clock nor the traffic
    counter can see them.
    """

    def reduce_op(x: Tensor, group: str) -> None:
        _wait(dist.all_reduce(x, group=_group(group), async_op=True))

    def gather_op(x: Tensor, size: int, group: str) -> Tensor:
        return all_gather_into(_empty_gathered(x, size), x.contiguous(), _group(group))

    def scatter_op(x: Tensor, size: int, group: str) -> Tensor:
        return reduce_scatter_into(_empty_scattered(x, size), x.contiguous(), _group(group))

    kernels: dict[str, tuple[Any, Any]] = {
        "all_reduce_(Tensor(a!) x, str group) -> ()": (reduce_op, lambda *_: None),
        "all_gather(Tensor x, int size, str group) -> Tensor": (
            gather_op,
            lambda x, size, _: _empty_gathered(x, size),
        ),
        "reduce_scatter(Tensor x, int size, str group) -> Tensor": (
            scatter_op,
            lambda x, size, _: _empty_scattered(x, size),
        ),
    }
    for schema, (kernel, meta_kernel) in kernels.items():
        name = LIBRARY.define(schema)
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        LIBRARY.impl(name, meta_kernel, "Meta")
    return torch.ops.paceline


def _group(name: str) -> Group:
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group(name)


LIBRARY = torch.library.Library("paceline", "FRAGMENT")
operators = _register_operators()
