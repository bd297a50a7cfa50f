"""Published results: bundled ones, those of a CSV file, and the peers of a score."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.mlperf.compare.published_scores import (
    accelerator_kind,
    on_same_accelerators,
    parse_scores_csv,
    published_scores,
    scores_of_round,
)

HEAD = "round,submitter,system,benchmark,division,gpus,accelerator,score_minutes,colour\n"


def test_the_results_that_come_along_are_those_of_the_logs(reference_data: Path):
    with (reference_data / "mlperf/results.csv").open() as opened:
        rows = {
            (r["round"], r["submitter"], r["system"], r["benchmark"]): r
            for r in csv.DictReader(opened)
        }
    published = published_scores()

    assert {(k.round, k.submitter, k.system, k.benchmark) for k in published} == set(rows)
    for score in published:
        row = rows[(score.round, score.submitter, score.system, score.benchmark)]
        assert score.score_minutes == float(row["score_minutes"]) and score.gpus == int(row["gpus"])
        assert score.mean_samples_to_target == float(row["mean_samples_to_target"])


def test_a_score_is_the_scaled_mean_of_its_runs():
    for score in published_scores():
        assert score.olympic_mean_minutes and score.rcp_scaling_factor
        scaled = score.olympic_mean_minutes * score.rcp_scaling_factor
        assert score.score_minutes == pytest.approx(scaled, rel=2e-4)


def test_every_accelerator_is_one_of_the_catalog():
    kinds = {accelerator_kind(score.accelerator) for score in published_scores()}

    assert kinds == {
        "B200",
        "B300",
        "GB200",
        "GB300",
        "H200-SXM",
        "H200-NVL",
        "MI300X",
        "MI325X",
        "MI350X",
        "MI355X",
    }
    assert (accelerator_kind("Wafer  9"), accelerator_kind(None)) == ("Wafer 9", None)


def test_only_the_same_round_division_number_and_kind_is_beside():
    of_8b = scores_of_round(published_scores(), "llama31_8b", "5.1.0", "closed")

    assert [score.gpus for score in of_8b] == sorted(score.gpus for score in of_8b)
    assert {score.submitter for score in on_same_accelerators(of_8b, 72, "GB300")} == {
        "NVIDIA",
        "Lambda",
    }
    assert on_same_accelerators(of_8b, 73, "GB300") == []
    assert scores_of_round(published_scores(), "llama31_8b", "5.1.0", "open") == []
    assert scores_of_round(published_scores(), "llama31_8b", "5.0.0", "closed") == []


def test_a_users_table_is_read_by_its_columns(tmp_path: Path):
    path = tmp_path / "results.csv"
    path.write_text(
        HEAD.replace("colour", "official") + "v5.1,A,box,flux1,closed,8,H100,99.5,blue\n"
    )
    (score,) = published_scores(path)

    assert (score.submitter, score.score_minutes, score.nodes) == ("A", 99.5, None)
    assert score.model_dump()["official"] is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v5.1,A,box,flux1,closed,8,H100,fast,\n", "results.csv:2: score_minutes"),
        ("v5.1,A,box,flux1,closed,,H100,9,\n", "results.csv:2: gpus"),
        ("", "holds no result"),
    ],
)
def test_a_table_with_a_fault_names_its_line(tmp_path: Path, text: str, words: str):
    path = tmp_path / "results.csv"
    path.write_text(HEAD + text)

    with pytest.raises(UserError, match=words):
        published_scores(path)


def test_a_table_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"no\.csv: cannot be read"):
        published_scores(tmp_path / "no.csv")
    assert parse_scores_csv("", "x") == ()
