"""The page of a scaling analysis shows every sub-cluster, the base, and the flagged nodes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks._simulated_cluster import Fault, SimulatedCluster, simulate
from paceline.core.node_groups import GroupThroughput
from paceline.report.html import render_document
from paceline.report.theme import EXPORT
from paceline.scaling.analysis.analysis import Analysis, AnalysisContext, analyse
from paceline.scaling.analysis.result import scale_result
from paceline.scaling.analysis.slow_nodes import HealthySpeed
from paceline.scaling.campaigns.result import CampaignResult, PartResult
from paceline.scaling.charts import MAX_DOTS, scaling_charts
from paceline.scaling.report import scaling_document, size_rows


@pytest.fixture(scope="module")
def faulty() -> Analysis:
    return simulate(SimulatedCluster(32, (Fault("slow", 7, 0.08),)), [1, 2, 8, 32])


def specs(analysis: Analysis, reference: float | None = None) -> dict[str, dict[str, Any]]:
    charts = scaling_charts(scale_result(analysis), analysis.measured, EXPORT, reference)
    return {name: chart.to_dict() for name, chart in charts.items()}


def page_of(*arguments: Any) -> str:
    return render_document(scaling_document(*arguments))


def rows_of(spec: dict[str, Any], layer: str) -> list[dict[str, Any]]:
    mark = next(part for part in spec["layer"] if part.get("name") == layer)
    return (mark.get("data") or spec["data"])["values"]


def test_every_planned_sub_cluster_is_a_dot(faulty: Analysis):
    for name in ("throughput", "efficiency"):
        dots = rows_of(specs(faulty)[name], "sub-clusters")
        assert [dot["nodes"] for dot in dots].count(2) == 16 and len(dots) == 32 + 16 + 4 + 1


def test_efficiency_is_held_against_the_named_base_and_the_reference(faulty: Analysis):
    spec = specs(faulty, reference=99.0)["efficiency"]
    assert {row["value"] for row in rows_of(spec, "ideal")} == {100.0}
    (level,) = {row["value"] for row in rows_of(spec, "reference")}
    assert level == pytest.approx(100 * 99.0 / faulty.base)
    words = " ".join(spec["title"]["subtitle"])
    assert (
        "median of 32 nodes" in words
        and "weak scaling" in words
        and "99 samples/s per node" in words
    )


def campaign(analysis: Analysis, *parts: PartResult) -> CampaignResult:
    fields = scale_result(analysis).model_dump()
    more = {"campaign": "c", "recipe": "opt-350m-sft", "variant": None, "devices_per_node": 8}
    return CampaignResult(**fields, **more, below_one_node=parts, runs=(), missing=0)  # type: ignore[arg-type]


def test_the_speed_up_starts_at_one_gpu_as_in_published_plots(faulty: Analysis):
    one = PartResult(devices=1, n=1, value=faulty.base / 7.5, spread=None, efficiency=None)
    result = campaign(faulty, one)
    spec = scaling_charts(result, faulty.measured, EXPORT)["speedup"].to_dict()
    rows = rows_of(spec, "speed-ups")
    assert [row["gpus"] for row in rows] == [1, 8, 16, 64, 256]
    assert rows[0]["value"] == 1.0
    assert rows[1]["value"] == pytest.approx(result.sizes[0].value / one.value)
    assert [row["value"] for row in rows_of(spec, "ideal")] == [1.0, 256.0]


def test_without_parts_of_a_node_the_speed_up_starts_at_the_smallest_size(faulty: Analysis):
    spec = scaling_charts(campaign(faulty), faulty.measured, EXPORT)["speedup"].to_dict()
    assert [row["gpus"] for row in rows_of(spec, "speed-ups")] == [8, 16, 64, 256]
    assert "8 GPUs" in str(spec)


def test_the_ideal_of_the_throughput_grows_with_the_nodes(faulty: Analysis):
    ends = rows_of(specs(faulty)["throughput"], "ideal")
    assert ends[1]["value"] == pytest.approx(32 * ends[0]["value"])


def test_the_flagged_node_is_named_in_the_chart(faulty: Analysis):
    spec = specs(faulty)["nodes"]
    assert [row["host"] for row in rows_of(spec, "names")] == ["node-0007"]
    assert len(rows_of(spec, "alone")) == 32


def test_very_many_groups_are_thinned_and_keep_their_ends():
    groups = [GroupThroughput((f"n{at}",), 100.0 + at / 1e4) for at in range(4096)]
    charts = specs(analyse(groups))
    dots = rows_of(charts["throughput"], "sub-clusters")
    assert len(dots) <= MAX_DOTS + 1
    shown = rows_of(charts["nodes"], "alone")
    assert len(shown) <= MAX_DOTS + 1 and [row["rank"] for row in shown[:3]] == [1, 2, 3]
    assert shown[-1]["rank"] == 4096
    assert (min(d["value"] for d in dots), max(d["value"] for d in dots)) == (100.0, 100.4095)


def test_the_page_says_the_answer_and_escapes_names(faulty: Analysis):
    page = page_of(scale_result(faulty), faulty.measured, "<script>alert(1)</script>")
    assert "<script>alert(1)</script>" not in page and "&lt;script&gt;alert(1)" in page
    assert "1 node flagged" in page and "node-0007" in page
    assert 'http-equiv="Content-Security-Policy"' in page


def test_a_single_node_has_a_page_too():
    analysis = analyse([GroupThroughput(("n1",), 100.0)])
    page = page_of(scale_result(analysis), analysis.measured, "one")
    assert "too few to judge" in page


def test_rows_are_flat_and_unrounded(faulty: Analysis):
    first, *_, last = size_rows(scale_result(faulty))
    assert first["efficiency"] == 1.0 and first["naive_straggler"] is None
    assert last["naive_straggler"] * last["naive_communication"] == pytest.approx(
        last["efficiency"]
    )


def test_a_node_that_a_reference_suspects_is_not_said_to_be_beyond_judgement():
    measured = [GroupThroughput(("n1",), 100.0), GroupThroughput(("n2",), 90.0)]
    result = scale_result(analyse(measured, AnalysisContext(reference=HealthySpeed(100.0))))
    assert [s.host for s in result.suspects] == ["n2"] and result.smallest_fault_found is None
    page = page_of(result, measured, "two", 100.0)
    assert "1 node suspected" in page and "too few to judge" not in page.lower()
    assert "Too few" not in str(scaling_charts(result, measured, EXPORT, 100.0)["nodes"].to_dict())
