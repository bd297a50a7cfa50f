"""Whole tensors from the pieces that ranks hold, and how far copies of a piece lie apiece."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.trainer.parallel.mesh import Mesh, MeshAxis


@dataclass(frozen=True)
class TensorShard:
    """What one rank holds of a tensor: piece `index` of `count` along `dim`, or rows of it."""

    tensor: Tensor
    dim: int = 0
    index: int = 0
    count: int = 1
    begin: int = 0
    rows: int | None = None
    """How many the piece has, `begin` being the first of them here; None where all are."""
    outer: tuple[tuple[int, int, int], ...] = ()
    """(dim, index, count) of pieces that the piece is itself a piece of, the outermost first."""

    @staticmethod
    def of_experts(tensor: Tensor | None, dim: int | None, mesh: Mesh) -> TensorShard | None:
        """A copy of what this rank holds of experts that ranks share out."""
        if tensor is None:
            return None
        outer = ((0, mesh.ep.index, mesh.ep.size),)
        if dim is not None:
            outer = (*outer, (dim, mesh.tp.index, mesh.tp.size))
        copies = mesh.expert_data
        if not isinstance(tensor, DTensor):
            return TensorShard(tensor.detach().clone(), outer=outer)
        local = tensor.to_local().detach().clone()
        return TensorShard(local, 1, copies.index, copies.size, outer=outer)

    @staticmethod
    def of(
        tensor: Tensor | None, dim: int | None, tp: MeshAxis, shard: MeshAxis
    ) -> TensorShard | None:
        """A copy of what this rank holds.

        FSDP cuts a tensor rank's piece by rows, as evenly as `torch.chunk`: its own gathering of
        the whole, a tensor at a time, would take most of a small training's time.
        """
        if tensor is None:
            return None
        where = {"dim": 0} if dim is None else {"dim": dim, "index": tp.index, "count": tp.size}
        if not isinstance(tensor, DTensor):
            return TensorShard(tensor.detach().clone(), **where)
        rows = tensor.shape[0] // (tp.size if dim == 0 else 1)
        begin = min(shard.index * -(-rows // shard.size), rows)
        return TensorShard(tensor.to_local().detach().clone(), **where, begin=begin, rows=rows)


@dataclass
class Joined:
    """Tensors put together; `apart` holds the largest relative L2 distance of two ranks' copies."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)


def join(ranks: Iterable[dict[str, TensorShard | None]]) -> Joined:
    """What all ranks hold, by name. A piece that nobody holds stays NaN."""
    joined = Joined()
    for pieces in ranks:
        for name, piece in pieces.items():
            if piece is not None:
                _put(joined, name, piece)
    return joined


def _put(joined: Joined, name: str, piece: TensorShard) -> None:
    shape = list(piece.tensor.shape)
    if piece.rows is not None:
        shape[0] = piece.rows
    size = shape[piece.dim] if shape else 1
    if shape:
        shape[piece.dim] *= piece.count
    for dim, _, count in piece.outer:
        shape[dim] *= count
    if name not in joined.tensors:
        joined.tensors[name] = piece.tensor.new_full(shape, math.nan)
        joined.apart[name] = 0.0
    place = joined.tensors[name]
    for dim, index, count in piece.outer:
        place = place.chunk(count, dim)[index]
    if place.ndim:
        place = place.narrow(piece.dim, piece.index * size, size)
        place = place.narrow(0, piece.begin, len(piece.tensor))
    if place.isnan().all():
        place.copy_(piece.tensor)
        return
    distance = torch.linalg.vector_norm((place - piece.tensor).double()).item()
    length = torch.linalg.vector_norm(place.double()).item()
    # NaN compares as the smaller one: a copy that is not finite must not hide.
    far = distance / max(length, 1e-30) if math.isfinite(distance) else math.inf
    joined.apart[name] = max(joined.apart[name], far)
