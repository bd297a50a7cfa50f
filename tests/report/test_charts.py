"""Charts draw what was measured: counts, ranges, bands, and nothing without data."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.core.run_report import RunReport
from paceline.core.steps import Step, Steps
from paceline.core.units import GIB
from paceline.core.window import steady_window
from paceline.report.charts import CHARTS, run_charts, save_chart, save_charts
from paceline.report.step_charts import MAX_POINTS, axis_range, chart_steps, rows_to_draw
from paceline.report.theme import DARK, EXPORT, LIGHT, ON_PAGE, ChartTheme
from tests.report.example import (
    failed_report,
    reference,
    referenced_report,
    report,
    single_step_report,
)


def spec_of(name: str, run: RunReport, look: ChartTheme = EXPORT) -> dict[str, Any]:
    """The Vega-Lite specification of one chart of the run."""
    return run_charts(run, look)[name].to_dict()


def rows_of(spec: dict[str, Any], layer: str) -> list[dict[str, Any]]:
    """The data rows of the layer with that name."""
    drawn_layer = next(part for part in spec["layer"] if part.get("name") == layer)
    data = drawn_layer.get("data") or spec["data"]
    return data.get("values") or spec["datasets"][data["name"]]


def long_run(num_steps: int) -> RunReport:
    """A run of many noisy steps, measured only as far as its charts need."""
    times = np.random.default_rng(3).normal(0.2, 0.001, num_steps)
    steps = Steps.of(Step(i, t) for i, t in enumerate(times.tolist(), start=1))
    return replace(report(window=steady_window(steps).record), steps=steps)


def mentioned(spec: Any) -> str:
    """Everything in a specification as text."""
    return str(spec)


def test_a_full_run_has_every_chart_in_the_page_order() -> None:
    assert list(run_charts(referenced_report(), EXPORT)) == list(CHARTS)


def test_n_steps_give_n_points() -> None:
    run = report()
    rows = rows_of(spec_of("step-times", run), "steps")
    assert [row["step"] for row in rows] == list(run.steps.index)
    assert [row["time"] for row in rows] == list(run.steps["step_time_s"])


def test_the_warm_up_is_told_from_the_window() -> None:
    run = report()
    window = run.result.window
    assert window is not None and window.first_step is not None
    rows = rows_of(spec_of("step-times", run), "steps")
    phases = [row["phase"] for row in rows]
    assert phases.count("steady window") == window.n
    assert phases[: window.n_warmup] == ["warm-up"] * window.n_warmup
    shade = rows_of(spec_of("step-times", run), "warmup")[0]
    assert (shade["step"], shade["step2"]) == (0.5, window.first_step - 0.5)


def test_the_band_lies_around_the_median_of_the_window() -> None:
    run = report()
    window = run.result.window
    assert window is not None and window.half_width_s is not None
    band = rows_of(spec_of("step-times", run), "band")[0]
    median = run.result.metrics["step_time_s"].value
    assert (band["y"] + band["y2"]) / 2 == pytest.approx(median)
    assert (band["y2"] - band["y"]) / 2 == pytest.approx(window.half_width_s)
    assert rows_of(spec_of("step-times", run), "median")[0]["median"] == pytest.approx(median)


def test_a_step_beyond_the_axis_stays_a_point_at_its_edge_with_its_true_time() -> None:
    run = report()
    first = rows_of(spec_of("step-times", run), "steps")[0]
    assert first["edge"] and first["shown"] < first["time"] == run.steps["step_time_s"][0]
    assert "beyond the axis" in mentioned(spec_of("step-times", run)["title"])


def test_the_distribution_counts_every_step_of_the_window() -> None:
    run = report()
    bins = rows_of(spec_of("distribution", run), "bins")
    assert run.result.window is not None
    assert sum(row["steps"] for row in bins) == run.result.window.n


def test_many_steps_are_thinned_to_their_extremes_and_the_chart_says_so() -> None:
    run = long_run(12_000)
    spec = spec_of("step-times", run)
    rows = rows_of(spec, "steps")
    assert len(rows) <= MAX_POINTS
    assert "of 12,000 steps drawn" in mentioned(spec["title"])
    times = run.steps["step_time_s"]
    assert max(row["time"] for row in rows) == times.max()
    assert min(row["time"] for row in rows) == times.min()


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=300), st.integers(2, 100))
def test_thinning_keeps_order_and_extremes(values: list[float], most: int) -> None:
    column = np.array(values)
    rows = rows_to_draw(column, most)
    assert len(rows) <= max(most, len(values) if len(values) <= most else most)
    assert list(rows) == sorted(set(rows))
    assert column[rows].max() == column.max() and column[rows].min() == column.min()


@given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=60), st.none() | st.floats(0.0001, 100))
def test_the_axis_has_a_range_and_holds_the_median(times: list[float], band: float | None) -> None:
    column = np.array(times)
    low, high = axis_range(column, float(np.median(column)), band)
    assert 0 <= low < high
    assert low <= np.median(column) <= high


def test_steps_without_a_time_are_no_points() -> None:
    steps = Steps.of([Step(1, 0.2, loss=3.0), Step(2, None, loss=2.9), Step(3, 0.2, loss=2.8)])
    run = replace(report(window=None), steps=steps)
    drawn = chart_steps(run)
    assert drawn is not None and list(drawn.index) == [1, 3]
    assert len(rows_of(spec_of("loss", run), "losses")) == 3


def test_equal_step_times_are_drawn() -> None:
    steps = Steps.of([Step(i, 0.5) for i in range(1, 21)])
    run = replace(report(window=steady_window(steps).record), steps=steps)
    assert len(rows_of(spec_of("step-times", run), "steps")) == 20
    assert rows_of(spec_of("distribution", run), "bins")[0]["steps"] == 20


def test_ranks_are_drawn_with_the_named_one_marked() -> None:
    spec = spec_of("ranks", report(8, 60, 5))
    rows = rows_of(spec, "ranks")
    assert [row["rank"] for row in rows] == list(range(8))
    assert max(rows, key=lambda row: row["busy"])["rank"] == 5
    assert min(rows, key=lambda row: row["wait"])["rank"] == 5
    label = rows_of(spec, "straggler")[0]
    assert label["rank"] == 5 and label["text"].startswith("rank 5: +2.")


def test_equal_ranks_have_no_mark() -> None:
    spec = spec_of("ranks", report(8, 60, None))
    assert not any(layer.get("name") == "straggler" for layer in spec["layer"])
    assert "No rank is slower" in mentioned(spec["title"])


def test_pipeline_stages_are_marked_where_there_are_several() -> None:
    ranks = tuple(
        r.model_copy(update={"stage": r.rank // 4}) for r in report(8, 60, 5).result.ranks
    )
    spec = spec_of("ranks", report(8, 60, 5, ranks=ranks))
    assert [(row["text"], row["rank"]) for row in rows_of(spec, "stages")] == [
        ("p0", 1.5),
        ("p1", 5.5),
    ]
    assert [row["rank"] for row in rows_of(spec, "borders")] == [3.5]
    notes = " ".join(spec["title"]["subtitle"])
    assert "compared within their stage" in notes and "of its stage in" in notes
    flat = spec_of("ranks", report(8, 60, 5))
    assert not any(layer.get("name") in ("stages", "borders") for layer in flat["layer"])
    assert "stage" not in mentioned(flat["title"])


def test_one_rank_or_ranks_without_busy_times_give_no_chart() -> None:
    assert "ranks" not in run_charts(report(1, 60, None), EXPORT)
    blank = tuple(r.model_copy(update={"busy_time_s": None}) for r in report().result.ranks)
    assert "ranks" not in run_charts(report(ranks=blank), EXPORT)


def test_memory_is_drawn_by_kind_against_what_the_device_has() -> None:
    spec = spec_of("memory", report())
    assert [row["kind"] for row in rows_of(spec, "kinds")] == ["resident"]
    assert rows_of(spec, "limit") == [{"gib": 8.0}]
    assert f"{8 * GIB / GIB:.2f} GiB" in mentioned(spec["title"])


def test_references_without_a_ratio_are_not_drawn() -> None:
    references = (reference("a", 1.0, 1.02), reference("b", 1.0, None, "no step time"))
    rows = rows_of(spec_of("references", report(references=references)), "references")
    assert [row["name"] for row in rows] == ["a"]
    assert "references" not in run_charts(report(references=references[1:]), EXPORT)


def test_a_run_without_steps_has_no_charts() -> None:
    assert run_charts(failed_report("oom"), EXPORT) == {}


def test_a_single_step_is_one_point_without_band_or_distribution() -> None:
    charts = run_charts(single_step_report(), EXPORT)
    spec = charts["step-times"].to_dict()
    assert len(rows_of(spec, "steps")) == 1
    assert not any(layer.get("name") == "band" for layer in spec["layer"])
    assert "distribution" not in charts


@pytest.mark.parametrize("name", list(CHARTS))
def test_every_axis_title_states_a_unit(name: str) -> None:
    for layer in spec_of(name, referenced_report())["layer"]:
        for axis in ("x", "y"):
            title = layer.get("encoding", {}).get(axis, {}).get("title")
            assert title is None or ("(" in title and title.endswith(")"))


def test_charts_of_the_page_take_their_colours_from_its_style() -> None:
    for chart in run_charts(referenced_report(), ON_PAGE).values():
        text = mentioned(chart.to_dict())
        assert "var(--steady)" in text
        assert not any(colour in text for colour in (LIGHT.steady, DARK.steady))


@pytest.mark.parametrize("form", ["svg", "png"])
def test_charts_are_written_as_files(form: str, tmp_path: Path) -> None:
    paths = save_charts(referenced_report(), tmp_path / "charts", [form])
    assert [path.name for path in paths] == [f"{name}.{form}" for name in CHARTS]
    assert all(path.stat().st_size > 1000 for path in paths)
    if form == "png":
        assert paths[0].read_bytes().startswith(b"\x89PNG")


def test_the_svg_export_has_a_point_per_step_and_real_colours(tmp_path: Path) -> None:
    run = report()
    chart = run_charts(run, EXPORT)["step-times"]
    text = save_chart(chart, tmp_path / "steps.svg").read_text()
    points = [
        e
        for e in ET.fromstring(text).iter()
        if e.get("aria-roledescription") in ("point", "circle")
    ]
    assert len(points) == len(run.steps)
    assert "var(--" not in text and LIGHT.steady in text
    assert "step time (s)" in text and "step (number)" in text


def test_another_format_is_refused_with_those_allowed(tmp_path: Path) -> None:
    chart = run_charts(report(), EXPORT)["loss"]
    with pytest.raises(UserError, match="svg, png"):
        save_chart(chart, tmp_path / "loss.gif")
