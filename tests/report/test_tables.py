"""CSV and Markdown hold every figure, and nothing in them is computed or rendered."""

from __future__ import annotations

import csv
import io
import math
import re

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.result import Metric, Result
from paceline.report.tables import interval_kinds, metric_rows, metrics_csv, metrics_md
from tests.report.example import HOSTILE, failed_report, report


def read(text: str) -> list[dict[str, str]]:
    """The rows of a CSV by column name."""
    return list(csv.DictReader(io.StringIO(text)))


def with_text(text: str) -> Result:
    """A result in which every free text is `text`."""
    metric = Metric(value=1.0, unit=text, note=text, source=text, convention=text, statistic=text)
    return report().result.model_copy(update={"run": text, "metrics": {text: metric}})


def test_csv_holds_every_metric_at_full_precision() -> None:
    result = report().result
    rows = read(metrics_csv(result))
    assert [row["name"] for row in rows] == list(result.metrics)
    for row in rows:
        value = result.metrics[row["name"]].value
        assert (row["value"] == "") if value is None else (float(row["value"]) == value)
        assert row["unit"] == result.metrics[row["name"]].unit
        assert row["run"] == result.run


def test_csv_keeps_fractions_between_0_and_1() -> None:
    row = next(row for row in read(metrics_csv(report().result)) if row["name"] == "of_achievable")
    assert 0 < float(row["value"]) < 1 and row["unit"] == "fraction"


def test_csv_says_which_steps_and_by_which_rule() -> None:
    rows = {row["name"]: row for row in read(metrics_csv(report().result))}
    assert re.fullmatch(r"\d+-60", rows["step_time_s"]["window"])
    assert rows["step_time_s"]["window_rule"] == "auto"
    assert rows["startup_s"]["window"] == rows["startup_s"]["window_rule"] == ""


def test_csv_of_a_run_without_figures_still_names_the_run_and_its_status() -> None:
    rows = read(metrics_csv(failed_report("oom").result))
    assert [(row["status"], row["name"]) for row in rows] == [("oom", "")]


@given(
    st.sampled_from("=+-@"),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
    st.sampled_from(["", " ", "\t", "\n", "  \n"]),
)
def test_no_text_in_csv_starts_a_formula(sign: str, rest: str, space: str) -> None:
    for row in read(metrics_csv(with_text(space + sign + rest))):
        for name in ("run", "name", "unit", "note", "source", "convention", "statistic"):
            assert row[name].startswith("'"), name


def test_a_negative_number_in_csv_stays_a_number() -> None:
    metric = Metric(value=-0.002, unit="fraction", low=-0.01, high=0.01)
    result = report().result.model_copy(update={"metrics": {"jitter_tax": metric}})
    row = read(metrics_csv(result))[0]
    assert float(row["value"]) == -0.002 and float(row["low"]) == -0.01


@given(st.text())
def test_csv_survives_any_text(text: str) -> None:
    rows = read(metrics_csv(with_text(text)))
    assert len(rows) == 1 and rows[0]["value"] == "1.0"


def test_values_that_are_not_finite_are_unknown() -> None:
    metric = Metric(value=math.nan, unit="s", spread=math.inf, low=math.nan, high=1.0)
    result = report().result.model_copy(update={"metrics": {"step_time_s": metric}})
    row = metric_rows(result)[0]
    assert (row.value, row.spread, row.low, row.high) == (None, None, None, 1.0)


def test_markdown_is_one_table_with_a_line_per_metric() -> None:
    result = report().result
    lines = metrics_md(result).splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 2 + len(result.metrics)
    assert {line.count(" | ") for line in table} == {8}
    assert "| `tokens_per_s` | 17,422 tokens/s |" in metrics_md(result)


def test_markdown_says_what_the_interval_is() -> None:
    assert "within-run 95 %" in interval_kinds(report().result)
    assert metrics_md(report().result).rstrip().endswith("bootstrap of the median.")


def test_markdown_of_a_failed_run_gives_the_reason() -> None:
    text = metrics_md(failed_report("oom").result)
    assert "out of memory" in text and "Reason: Rank 1 ran out of memory" in text
    assert "| ---" not in text


@given(st.text())
def test_no_text_breaks_out_of_its_markdown_cell(text: str) -> None:
    lines = metrics_md(with_text(text)).splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 3
    assert len(re.findall(r"(?<!\\)\|", table[2].replace(r"\\", ""))) == 10


def test_markup_in_markdown_stays_text() -> None:
    assert r"\</script\>\<img src=x" in metrics_md(with_text(HOSTILE))
