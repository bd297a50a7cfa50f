"""ZeRO 1's slices: equal for any number of ranks, and whole again in a checkpoint."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from paceline.trainer.checkpoint_tensors import as_flat_slice, rectangles
from paceline.trainer.parallel.mesh import Mesh, MeshAxis
from paceline.trainer.parallel.tensor import ParamPlan
from paceline.trainer.replica.weight_slices import SLICE_ALIGNMENT, WeightSlices

ROWS = ParamPlan(shard_dim=0)
SHAPES = ((64, 24), (24,), (96, 24), (7,), (24, 96), (3, 5, 8))
"""Sizes that no number of ranks divides, and one tensor as large as many others together."""


def weights(generator: torch.Generator) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64, 1000])
def test_every_element_is_one_ranks_and_all_ranks_have_as_many(ranks: int) -> None:
    whole = weights(torch.Generator().manual_seed(1))
    owned = [torch.zeros(p.numel(), dtype=torch.int64) for p in whole]
    counts: list[int] = []
    for rank in range(ranks):
        mine = weights(torch.Generator().manual_seed(1))
        slices = WeightSlices((mine, MeshAxis(ranks, rank)))
        assert all(torch.equal(a, b) for a, b in zip(mine, whole, strict=True))
        counts.append(sum(piece.weight.numel() for piece in slices.slices.values()))
        for parameter, piece in slices.slices.items():
            owned[next(i for i, p in enumerate(mine) if p is parameter)][
                piece.begin : piece.end
            ] += 1
            with torch.no_grad():
                piece.weight.fill_(5.0)
            assert (parameter.flatten()[piece.begin : piece.end] == 5.0).all()

    assert all((times == 1).all() for times in owned)
    total = sum(map(len, owned))
    assert max(counts) <= -(-total // ranks) + SLICE_ALIGNMENT


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_rectangles_hold_a_run_of_elements_in_order(
    shape: tuple[int, ...], ends: tuple[float, float]
) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    begin, end = sorted(round(part * whole.numel()) for part in ends)

    boxes = list(rectangles(shape, begin, end))

    found = [
        whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten()
        for offsets, sizes in boxes
    ]
    joined = torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
    assert torch.equal(joined, torch.arange(begin, end))
    assert len(boxes) <= 2 * len(shape) - 1


def test_a_piece_tells_dcp_where_it_lies_in_the_whole_tensor() -> None:
    """Tensor rank 1 of 2 has rows 4 to 7 of 8; the piece is all but its first and last element."""
    tensor_rank = MeshAxis(2, 1)
    piece = as_flat_slice(ROWS, torch.arange(1.0, 11.0), (4, 3), 1, Mesh(tp=tensor_rank))

    chunks = piece.__create_chunk_list__()

    assert piece.size() == (8, 3)
    assert [tuple(chunk.offsets) for chunk in chunks] == [(4, 1), (5, 0), (7, 0)]
    assert [tuple(chunk.sizes) for chunk in chunks] == [(1, 2), (2, 3), (1, 2)]
    middle = piece.__get_tensor_shard__(MetadataIndex("", chunks[1].offsets))
    middle.fill_(0.0)
    assert piece.elements.tolist() == [1, 2, 0, 0, 0, 0, 0, 0, 9, 10]
    alone = as_flat_slice(ROWS, torch.arange(12.0), (4, 3), 0, Mesh())
    assert len(alone.__create_chunk_list__()) == 1
