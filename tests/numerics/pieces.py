"""Whole tensors from the pieces that ranks hold, and how far copies of a piece lie apiece."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a tensor: piece `index` of `count` along `dim`."""

    tensor: Tensor
    dim: int = 0
    index: int = 0
    count: int = 1

    @staticmethod
    def of(tensor: Tensor | None, dim: int | None, index: int, count: int) -> Piece | None:
        """A copy of what this rank holds; a DTensor's shards are gathered by all its ranks."""
        if tensor is None:
            return None
        if isinstance(tensor, DTensor):
            return Piece(tensor.full_tensor().detach().clone())
        copy = tensor.detach().clone()
        return Piece(copy) if dim is None else Piece(copy, dim, index, count)


@dataclass
class Joined:
    """Tensors put together; `apart` holds the largest relative L2 distance of two ranks' copies."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)


def join(ranks: Iterable[dict[str, Piece | None]]) -> Joined:
    """What all ranks hold, by name. A piece that nobody holds stays NaN."""
    joined = Joined()
    for pieces in ranks:
        for name, piece in pieces.items():
            if piece is not None:
                _put(joined, name, piece)
    return joined


def _put(joined: Joined, name: str, piece: Piece) -> None:
    size = piece.tensor.shape[piece.dim] if piece.tensor.ndim else 1
    if name not in joined.tensors:
        shape = list(piece.tensor.shape)
        if piece.tensor.ndim:
            shape[piece.dim] *= piece.count
        joined.tensors[name] = piece.tensor.new_full(shape, math.nan)
        joined.apart[name] = 0.0
    whole = joined.tensors[name]
    place = whole.narrow(piece.dim, piece.index * size, size) if whole.ndim else whole
    if place.isnan().all():
        place.copy_(piece.tensor)
        return
    distance = torch.linalg.vector_norm((place - piece.tensor).double()).item()
    length = torch.linalg.vector_norm(place.double()).item()
    # NaN compares as the smaller one: a copy that is not finite must not hide.
    far = distance / max(length, 1e-30) if math.isfinite(distance) else math.inf
    joined.apart[name] = max(joined.apart[name], far)
