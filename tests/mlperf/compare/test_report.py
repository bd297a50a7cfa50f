"""Every form of a comparison says which figures are official."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.mlperf.compare.comparison import ScoreComparison, compare
from paceline.mlperf.compare.report import compared_rows, scores_document, time_to_train
from paceline.mlperf.rules import UNOFFICIAL
from paceline.report.charts import save_chart
from paceline.report.document import Table
from paceline.report.terminal import plain_text
from paceline.report.theme import EXPORT
from tests.mlperf.submissions import ten_runs


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> ScoreComparison:
    folder = tmp_path_factory.mktemp("compared")
    small = ten_runs(folder / "small <b>")
    large = ten_runs(folder / "large", global_batch_size=16, samples=4224)
    return compare([small, large], num_devices=[8, 64], accelerator="GB200")


def test_rows_tell_official_from_own(comparison: ScoreComparison):
    rows = compared_rows(comparison)

    unofficial = [row for row in rows if not row["official"]]
    assert len(unofficial) == 2 and {row["label"] for row in unofficial} == {UNOFFICIAL}
    published = [row for row in rows if row["official"]]
    assert published and all("published by MLCommons" in row["label"] for row in published)
    assert all(row["time_ratio"] is not None for row in published)


def test_lines_split_the_efficiency_and_name_the_label(comparison: ScoreComparison):
    document = scores_document(comparison)
    text = plain_text(document)
    own = next(each for each in document.sections if each.title == "Strong scaling, these runs")

    assert isinstance(own, Table)
    assert {"64", "16", "10.1875", "12.5%", "81.8%"} < set(own.cells()[-1])
    assert "Strong scaling, published by NVIDIA on GB200" in text
    assert "not an official MLPerf metric" in text and f"Not official: {UNOFFICIAL}." in text


def test_the_plot_draws_every_result_and_is_written_in_both_forms(
    comparison: ScoreComparison, tmp_path: Path
):
    chart = time_to_train(comparison, EXPORT)
    layers = {layer["name"]: layer["data"]["values"] for layer in chart.to_dict()["layer"]}

    assert len(layers["published"]) == len(comparison.published) and len(layers["scores"]) == 2
    assert {row["alike"] for row in layers["published"]} == {True, False}
    assert UNOFFICIAL in chart.to_dict()["description"]
    assert "<svg" in save_chart(chart, tmp_path / "a.svg").read_text()
    assert save_chart(chart, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_comparison_without_a_published_result_still_draws(comparison: ScoreComparison):
    bare = comparison.model_copy(update={"published": (), "scores": ()})

    assert time_to_train(bare, EXPORT).to_dict()["layer"]
