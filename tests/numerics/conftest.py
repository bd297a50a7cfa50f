"""What all cases came to, trained once for all tests of the suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.numerics.cases import (
    Case,
    by_inductor,
    dropping,
    exact,
    reference,
    rounded,
    trained_table,
)
from tests.numerics.models import MODELS
from tests.numerics.pool import Results, run_all
from tests.numerics.test_faults import BROKEN, BROKEN_RANK


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """Every case's result; PACELINE_CASE_TIMES=1 prints how long each took."""
    cases = [*trained_table(), *by_inductor(), *rounded(), BROKEN_RANK, *BROKEN]
    plain = [Case(1, "", model, "fp64") for model in MODELS]
    references = [*plain, *(reference(case) for case in cases)]
    dropped = [case for pair in dropping() for case in pair]
    exact_ones = [exact(case) for case in references if case.dtype == "bf16"]
    found = run_all(
        [*references, *exact_ones, *cases, *dropped], tmp_path_factory.mktemp("numerics")
    )
    if os.environ.get("PACELINE_CASE_TIMES"):
        print(f"\n{found.seconds()}")
    yield found
    found.remove()
