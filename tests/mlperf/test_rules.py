"""What the rules fix is in one table, and a path tells its round."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.engines.log_reading.mllog import MlRecord
from paceline.files.recipe import load_recipe
from paceline.mlperf.rules import (
    BENCHMARKS,
    find_benchmark,
    is_tiny,
    not_a_result,
    round_in,
    select_ruleset,
)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_recipe_of_its_model(name: str):
    benchmark = find_benchmark(name, "here")

    assert load_recipe(benchmark.recipe, benchmark.variant).flops_convention
    assert benchmark.num_runs == 10


def test_an_unknown_benchmark_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"here: benchmark 'llama31_8' is unknown.*mean 'll"):
        find_benchmark("llama31_8", "here")


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


KNOWN = ["5.0.0", "5.1.0", "6.0.0", "6.1.0"]


@pytest.mark.parametrize(
    ("place", "stated", "having", "expected"),
    [
        ("/x/v5.0/runs", ["6.0.0"], KNOWN, ("6.0.0", "logs")),
        ("/x/v5.0/runs", [], KNOWN, ("5.0.0", "path")),
        ("/x/v5.1/org/results/PowerEdge_n1_v5.0/flux1", [], KNOWN, ("5.1.0", "path")),
        ("/x/box_n1_v5.0/flux1", [], KNOWN, ("5.1.0", "default")),
        ("/x/v5.0/runs", [], ["5.1.0", "6.0.0"], ("5.1.0", "default")),
        ("/x/runs", [], ["6.0.0", "6.1.0"], ("6.1.0", "benchmark")),
        ("/x/runs", ["5.1.0"], ["6.0.0", "6.1.0"], ("6.1.0", "benchmark")),
        ("/x/runs", ["5.1.0", "6.0.0"], KNOWN, ("5.1.0", "default")),
        ("/x/runs", [], [], ("5.1.0", "default")),
    ],
)
def test_the_ruleset_is_the_logs_then_the_folders_of_those_with_the_benchmark(
    place: str, stated: list[str], having: list[str], expected: tuple[str, str]
):
    settled = select_ruleset(Path(place), stated, KNOWN, having)
    assert (settled.name, settled.origin) == expected


def test_what_is_passed_over_is_said():
    settled = select_ruleset(Path("/x/v2.7/runs"), ["5.0.0"], KNOWN, ["6.0.0"])
    assert settled.warnings == (
        "the logs report ruleset 5.0.0, which lacks the benchmark; using 6.0.0",
        "the path contains v2.7, which has no reference points in Paceline; using 6.0.0",
    )
    both = select_ruleset(Path("/x/v5.0/runs"), ["6.0.0"], KNOWN, KNOWN)
    assert both.warnings == (
        "the path contains v5.0, but the logs report ruleset 6.0.0; using 6.0.0",
    )


def line(key: str, value: object) -> MlRecord:
    return MlRecord(key, value, 0.0, "POINT_IN_TIME")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("submission_platform", "tiny system on 2 cores", "a tiny variant"),
        ("submission_org", "a-tiny-one", "a tiny variant"),
        ("data_source", "synthetic", "it trained on synthetic data"),
        ("data_source", "stdlib", "it trained on stdlib data"),
        ("note", "this is not an MLPerf result", "the log is labelled"),
    ],
)
def test_what_speaks_against_a_result(key: str, value: str, reason: str):
    assert reason in str(not_a_result([None, line("seed", 1), line(key, value)]))


def test_a_run_of_the_benchmark_is_one():
    lines = [
        line("submission_platform", "DestinyBox"),
        line("data_source", "tokens"),
        line("a", None),
    ]

    assert not_a_result(lines) is None


@pytest.mark.parametrize(
    ("name", "tiny"),
    [
        ("llama TINY", True),
        ("2xtiny_cpu", True),
        ("foxtiny", False),
        ("Destiny", False),
        (None, False),
    ],
)
def test_the_word_in_a_name(name: str | None, tiny: bool):
    assert is_tiny(name) is tiny
