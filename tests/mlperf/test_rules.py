"""What the rules fix is in one table, and a path tells its round."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.files.recipe import load_recipe
from paceline.mlperf.rules import BENCHMARKS, benchmark_named, round_in


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_recipe_of_its_model(name: str):
    benchmark = benchmark_named(name, "here")

    assert load_recipe(benchmark.recipe, benchmark.variant).flops_convention
    assert benchmark.num_runs == 10


def test_an_unknown_benchmark_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"here: benchmark 'llama31_8' is not known here.*mean 'll"):
        benchmark_named("llama31_8", "here")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("/data/v5.1/org/results", ("v5.1", "5.1.0")),
        ("/data/training_results_v5.0/v5.1-notes", ("training_results_v5.0", "5.0.0")),
        ("/v4.1/v5.0", ("v5.0", "5.0.0")),
        ("/data/v5", None),
        ("/data/5.1", None),
    ],
)
def test_the_innermost_folder_that_names_a_round_counts(
    place: str, expected: tuple[str, str] | None
):
    assert round_in(Path(place)) == expected
