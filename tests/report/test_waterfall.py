"""The MFU waterfall: levels that add up, and a page that escapes its texts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.measured_step import with_measurement
from paceline.estimate.model.waterfall import extend_to_measured
from paceline.estimate.report import EstimateOutput, estimate_document
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import estimate
from paceline.report.charts import run_charts, save_chart
from paceline.report.html import render_document
from paceline.report.theme import EXPORT
from paceline.report.waterfall import waterfall_chart, waterfall_rows
from tests.report.example import levels, referenced_report, render_html, report

FOUND = estimate(EstimateRequest("llama31-70b", "H100-SXM", 64), shipped_evidence())


def test_the_levels_lead_from_the_peak_to_the_estimated_rate():
    levels = FOUND.waterfall
    assert levels[0].name == "peak" and levels[0].share == 1 and levels[-1].name == "estimated"
    assert levels[-1].flops_per_s == pytest.approx(FOUND.flops_per_s_per_device)
    assert FOUND.mfu == pytest.approx(levels[-1].share)
    ideal = FOUND.flops_per_s_per_device * FOUND.step_time_s / levels[0].flops_per_s
    assert sum(level.lost_s for level in levels) == pytest.approx(FOUND.step_time_s - ideal)
    assert {"tensor parallelism", "context parallelism", "pipeline bubble"} <= {
        level.name for level in levels
    }
    assert "expert parallelism" not in {level.name for level in levels}


def test_a_bar_hangs_from_the_one_before():
    rows = waterfall_rows(FOUND.waterfall)
    assert rows[0]["start"] == rows[-1]["start"] == 0
    assert all(row["start"] == before["end"] for before, row in pairwise(rows[:-1]))
    chart = waterfall_chart(FOUND.waterfall, EXPORT).to_dict()
    assert "peak" in str(chart) and "bubble" in str(chart)


def test_where_a_convention_counts_what_is_not_computed_that_is_said():
    long = ("training.seq_len=131072", "training.batch_per_device=1", "layout.cp=8")
    for convention, rises in (("full-attention", True), ("causal", False)):
        asked = (*long, f"flops_convention={convention}")
        found = estimate(
            EstimateRequest("llama31-8b", "H100-SXM", 64, overrides=asked), shipped_evidence()
        )
        shares = {level.name: level.share for level in found.waterfall}
        assert (shares["GEMMs and attention"] > shares["GEMM efficiency"]) is rises
        words = f"the convention {convention}, which counts masked attention"
        assert any(words in note for note in found.notes) is rises
        chart = waterfall_chart(found.waterfall, EXPORT, convention=convention).to_dict()
        assert f"FLOPs by {convention}" in str(chart)
        assert ("counts operations that are not computed" in str(chart)) is rises


def test_the_chart_can_be_drawn(tmp_path: Path):
    """Vega refuses layers of one name with data of their own, which no specification shows."""
    svg = save_chart(waterfall_chart(FOUND.waterfall, EXPORT), tmp_path / "w.svg").read_text()
    assert "GEMM efficiency" in svg and "54." in svg


@pytest.mark.parametrize(("factor", "kind"), [(1.2, "loss"), (0.9, "gain"), (1.0, "loss")])
def test_a_measured_step_is_a_bar_of_its_own_and_the_rest_hangs_between(factor: float, kind: str):
    measured_s = factor * FOUND.step_time_s
    rows = waterfall_rows(extend_to_measured(FOUND.waterfall, FOUND.step_time_s, measured_s))
    estimated, rest, measured = rows[-3:]
    assert (rest["start"], rest["end"]) == (estimated["end"], measured["end"])
    assert rest["kind"] == kind and measured["kind"] == estimated["kind"] == "total"
    assert measured["start"] == 0 and measured["end"] == pytest.approx(estimated["end"] / factor)


def test_the_page_of_a_measured_step_says_so():
    measured = EstimateOutput([with_measurement(FOUND, 18.0, "as stated")])
    page = render_document(estimate_document(measured))
    assert "estimate and measured step" in page
    assert "unexplained" in page and "to the measured step" in page


def test_a_run_has_the_chart_and_the_sentence_where_it_was_estimated():
    page = render_html(referenced_report())
    assert "MFU waterfall to the measured step" in page
    assert ">Expected 0.15" in page
    assert "waterfall" not in run_charts(report(), EXPORT)
    assert ">Expected 0.15" not in render_html(report())
    assert waterfall_rows(levels())[-2]["kind"] == "loss"
