"""A fault put into one exchange, one rank or one stage is found by the comparison."""

from __future__ import annotations

import pytest

from tests.numerics.cases import Case, reference
from tests.numerics.compare import TOLERANCE, largest_difference
from tests.numerics.pool import Results

MARGIN = 1e4
BROKEN = [
    Case(2, "mb6", "llama", "fp64", "unreduced gradients"),
    Case(2, "tp2", "llama", "fp64", "unreduced inputs"),
    Case(2, "tp2 sp", "llama", "fp64", "unsummed shares"),
    Case(2, "pp2 mb3", "gpt", "fp64", "lonely table"),
    Case(2, "mb6", "gpt", "fp64", "wrong weight"),
    Case(2, "zero3 mb6", "gpt", "fp64", "wrong weight"),
    Case(2, "masked", "llama", "fp64", "own count"),
    Case(2, "cp2 masked", "llama", "fp64", "own count"),
    Case(2, "pp2 mb3", "llama", "fp64", "idle stage"),
    Case(2, "pp2 mb3", "llama", "fp64", "lonely norm"),
    Case(2, "mb6", "llama", "fp64", "drifting rank"),
    Case(2, "cp2", "llama", "fp64", "lonely keys"),
    Case(1, "mb4 budget20", "llama", "fp64", "other inputs"),
    Case(2, "tp2", "lora", "fp64", "lonely adapters"),
    Case(2, "tp2", "sft", "fp64", "lonely adapters"),
    Case(2, "tp2", "flux", "fp64", "lonely heads"),
    Case(2, "tp2", "flux", "fp64", "unreduced inputs"),
    Case(2, "cp2", "flux", "fp64", "lonely streams"),
    Case(4, "ep2 mb1", "mixtral", "fp64", "lonely experts"),
    Case(2, "ep2 mb3", "mixtral", "fp64", "lost results"),
]
BROKEN_RANK = Case(2, "mb6", "llama", "fp64", "broken rank")


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_a_fault_is_noticed_by_a_wide_margin(case: Case, results: Results) -> None:
    worst, where = largest_difference(results[case], results[reference(case)])

    assert worst > MARGIN * TOLERANCE["fp64"], where


def test_a_rank_that_raises_fails_its_own_case_and_no_other(results: Results) -> None:
    with pytest.raises(AssertionError, match="RuntimeError: broken on purpose"):
        results[BROKEN_RANK]

    assert results[BROKEN[-1]]
