"""Pieces of all ranks make a whole, and what is missing or differs is seen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.numerics.compare import difference, largest_difference, worse_than_rounding
from tests.numerics.pieces import TensorShard, join

WHOLE = torch.arange(24.0).view(4, 6) + 1


def halves(dim: int) -> list[TensorShard]:
    """The two pieces of WHOLE along a dimension."""
    return [TensorShard(half, dim, index, 2) for index, half in enumerate(WHOLE.chunk(2, dim))]


@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_are_put_where_they_belong(dim: int) -> None:
    joined = join({"w": piece} for piece in reversed(halves(dim)))

    assert torch.equal(joined.tensors["w"], WHOLE)
    assert joined.apart == {"w": 0.0}


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_of_a_piece_are_put_into_it(dim: int) -> None:
    ranks: list[dict[str, TensorShard | None]] = [
        {"w": TensorShard(rows, dim, half.index, 2, begin, len(half.tensor))}
        for half in halves(dim)
        for begin, rows in ((1, half.tensor[1:]), (0, half.tensor[:1]), (2, half.tensor[2:2]))
    ]

    assert torch.equal(join(ranks).tensors["w"], WHOLE)
    assert difference(join(ranks[1:]).tensors["w"], WHOLE) == math.inf


def test_a_piece_that_no_rank_holds_makes_the_difference_infinite() -> None:
    joined = join([{"w": halves(0)[0]}, {"w": None}])

    assert difference(joined.tensors["w"], WHOLE) == math.inf


def test_copies_are_compared_with_each_other() -> None:
    first, second = halves(1)
    other = TensorShard(second.tensor * 1.01, 1, 1, 2)

    joined = join([{"w": first}, {"w": second}, {"w": other}])

    assert joined.apart["w"] == pytest.approx(0.01, rel=1e-4)


def test_a_copy_that_is_not_a_number_is_infinitely_far() -> None:
    first, second = halves(0)
    lost = TensorShard(torch.full_like(second.tensor, math.nan), 0, 1, 2)

    assert join([{"w": first}, {"w": second}, {"w": lost}]).apart["w"] == math.inf


def test_a_scalar_is_a_piece_as_well() -> None:
    joined = join([{"s": TensorShard(torch.tensor(2.0))}, {"s": TensorShard(torch.tensor(3.0))}])

    assert joined.tensors["s"] == 2
    assert joined.apart["s"] == 0.5


def test_ranks_that_differ_are_the_largest_difference_when_the_rest_agrees() -> None:
    result = {
        "figures": torch.tensor([[3.0, 1.0]]),
        "evaluation": torch.tensor(2.0),
        "gradients": [{"w": WHOLE}],
        "weights": {"w": WHOLE},
        "apart": {"norms": 0.0},
    }

    assert largest_difference(result, result)[0] == 0
    assert largest_difference({**result, "apart": {"norms": 0.5}}, result) == (
        0.5,
        "copies of norms",
    )


def test_a_gradient_that_only_one_training_has_is_refused() -> None:
    result = {
        "figures": torch.tensor([[3.0, 1.0]]),
        "evaluation": torch.tensor(2.0),
        "gradients": [{"w": WHOLE}],
        "weights": {},
        "apart": {},
    }

    with pytest.raises(AssertionError):
        largest_difference({**result, "gradients": [{}]}, result)


def test_ranks_that_differ_by_no_number_are_infinitely_far() -> None:
    result = {
        "figures": torch.tensor([[3.0, 1.0]]),
        "evaluation": torch.tensor(2.0),
        "gradients": [{"w": WHOLE}],
        "weights": {},
        "apart": {"losses": 0.5, "norms": math.nan, "w": 0.25},
    }

    assert largest_difference(result, result) == (math.inf, "copies of norms")


def test_a_training_of_no_steps_is_refused() -> None:
    figures, evaluation = torch.tensor([[3.0, 1.0]]), torch.tensor(2.0)
    result = {"figures": figures, "evaluation": evaluation, "weights": {}, "apart": {}}

    for mine, theirs in (([], []), ([{"w": WHOLE}], []), ([], [{"w": WHOLE}])):
        with pytest.raises(AssertionError, match="no step to compare"):
            largest_difference({**result, "gradients": mine}, {**result, "gradients": theirs})


def test_a_layout_three_times_as_far_as_one_process_is_seen() -> None:
    def result(error: float) -> dict[str, Any]:
        figures = torch.tensor([[3.0, 1.0]])
        gradients = [{"w": WHOLE * (1 + error), "b": WHOLE * 1.01}]
        return {
            "figures": figures,
            "evaluation": torch.tensor(2.0),
            "gradients": gradients,
            "weights": {},
            "apart": {},
        }

    times, where = worse_than_rounding(
        result(0.03),
        result(0.01),
        result(0.0) | {"gradients": [{"w": WHOLE, "b": WHOLE}]},
        of_gradients=True,
    )

    assert times == pytest.approx(3, rel=1e-3)
    assert where == "step 1: w"
