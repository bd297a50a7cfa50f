"""Ranks that share a sequence compute what one process computes, and each as much as the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.core.layout import Layout
from paceline.core.layout_checks import native_problems
from paceline.core.parallel_run import ParallelRun
from paceline.trainer.model.context_parallel import attend, local_positions
from paceline.trainer.parallel.mesh import MeshAxis
from tests.example import SHAPE
from tests.trainer.worlds import DTYPES, EXCHANGES, FAULTS, HEADS, outcome

RANKS = (2, 4)
EXACT = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 0.03}


def axis(size: int, index: int) -> MeshAxis:
    return MeshAxis(size, index, None, tuple(range(size)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("ranks", RANKS)
def test_output_and_gradients_are_those_of_one_process(
    ranks: int, exchange: str, heads: str, dtype: str
) -> None:
    errors = outcome(ranks)[f"{exchange} {heads} {dtype}"]

    assert set(errors) == {"out", "q", "k", "v"}
    assert max(errors.values()) < EXACT[dtype]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("ranks", RANKS)
def test_long_sequences_take_the_fused_kernels(ranks: int, exchange: str) -> None:
    assert max(outcome(ranks)[f"{exchange} fused"].values()) < EXACT["float64"]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_of_an_axis_need_not_be_neighbours(exchange: str) -> None:
    assert max(outcome(4)[f"{exchange} pairs"].values()) < EXACT["float64"]


@pytest.mark.parametrize(
    ("exchange", "fault"), [(exchange, fault) for exchange in FAULTS for fault in FAULTS[exchange]]
)
@pytest.mark.parametrize("ranks", RANKS)
def test_the_comparison_finds_a_fault(ranks: int, exchange: str, fault: str) -> None:
    assert max(outcome(ranks)[f"{exchange} fault {fault}"].values()) > 10 * EXACT["bfloat16"]


@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_that_nobody_sums_leave_the_output_right(ranks: int) -> None:
    errors = outcome(ranks)["all-gather fault unsummed"]

    assert max(errors["out"], errors["q"]) < EXACT["float64"]
    assert min(errors["k"], errors["v"]) > 10 * EXACT["bfloat16"]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_has_the_same_work_and_none_that_the_mask_throws_away(
    ranks: int, exchange: str
) -> None:
    work = outcome(ranks)["work"]

    assert len(set(work[exchange])) == 1
    assert sum(work[exchange]) <= work["all"][0]
    assert len(set(work["consecutive"])) == ranks


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_token_has_one_rank(size: int) -> None:
    held = [local_positions(48, axis(size, index)) for index in range(size)]

    assert torch.equal(torch.cat(held).sort().values, torch.arange(48))
    assert {len(positions) for positions in held} == {48 // size}


def test_a_rank_holds_a_chunk_from_each_end() -> None:
    assert local_positions(16, axis(4, 1)).tolist() == [2, 3, 12, 13]
    assert local_positions(16, axis(4, 3)).tolist() == [6, 7, 8, 9]


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    q, k, v = (torch.randn(1, 6, n, 4) for n in (4, 2, 2))

    with pytest.raises(ValueError, match="3 context-parallel ranks cannot share 4 heads"):
        attend(q, k, v, axis(3, 0), "all-to-all")


def test_a_ring_refuses_a_window() -> None:
    model = {"sliding_window": 8}
    layout = Layout(cp=2, cp_exchange="ring")
    problems = native_problems(ParallelRun(layout, SHAPE.model_copy(update=model), 2, 8))

    assert [p for p in problems if "a window of 8 tokens" in p and "cp_exchange=all-gather" in p]


def test_a_rank_alone_exchanges_nothing() -> None:
    q, k, v = (torch.randn(1, 7, n, 4) for n in (4, 2, 2))
    alone = replace(axis(1, 0), group=None)

    assert torch.equal(attend(q, k, v, alone, "ring"), attend(q, k, v, alone, "all-gather"))
