"""One run as a document: its figures with interval and basis, its failures, its raw rows."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cli.options import ReportFormat
from paceline.cli.output import render
from paceline.core.result import Metric, Status
from paceline.core.run_report import RunReport
from paceline.report.markdown import markdown
from paceline.report.run_document import metric_rows, run_document, run_figures
from paceline.report.terminal import plain_text
from tests.report.example import (
    STATUSES,
    failed_report,
    hostile_report,
    referenced_report,
    report,
    single_step_report,
)


def printed(run: RunReport) -> str:
    return plain_text(run_document(run))


def csv_rows(run: RunReport) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(render(run_document(run), ReportFormat.csv))))


def test_the_figures_have_value_interval_steps_and_background() -> None:
    speed, step, share, memory = run_figures(report())
    assert speed.value == "17,422 tokens/s" and speed.interval == "± 0.2% within-run 95%"
    assert speed.details[0] == "median of 54 steady steps (7-60)"
    assert {"rank 1 on node-000 busiest (+2.0%)", "2.31 s start-up"} <= set(step.details)
    assert share.value == "62.7%"
    assert share.details == (
        "of 590 GFLOP/s achievable GEMM throughput in bf16",
        "MFU: no data-sheet peak for cpu in bf16",
    )
    assert memory.value.endswith("GiB") and memory.details[0].startswith("resident peak")


def test_padded_samples_come_with_the_text_in_them() -> None:
    metrics = report().result.metrics
    share = metrics["real_token_fraction"].model_copy(update={"value": 0.75})
    run = report(headline="samples_per_s", metrics={**metrics, "real_token_fraction": share})
    speed = run_figures(run)[0]
    assert speed.value.endswith("samples/s")
    assert {"17,422 tokens/s of text", "75.0% of the tokens are not padding"} <= set(speed.details)


def test_images_are_counted_in_samples_without_tokens() -> None:
    speed = run_figures(report(headline="samples_per_s"))[0]
    assert speed.value.endswith("samples/s") and "tokens/s" not in " ".join(speed.details)


def test_equal_ranks_blame_nobody() -> None:
    assert "busiest" not in printed(report(slow_rank=None))


def test_the_text_ends_with_the_run_folder_and_its_main_files() -> None:
    last = printed(report()).splitlines()[-1]
    assert last.split() == [report().folder, "result.json", "steps.jsonl", "job.sh"]


def test_references_are_listed_with_ratio_or_the_reason_against() -> None:
    text = " ".join(printed(referenced_report()).split())
    assert "tiny-llama/epyc-9654 Throughput 17,310 tokens/s 1.021" in text
    assert "no: prints the last step, not the median" in text


@pytest.mark.parametrize("status", [s for s in STATUSES if s != "ok"])
def test_a_run_without_success_says_status_reason_log_and_what_to_do(status: Status) -> None:
    text = printed(failed_report(status, 3))
    run = failed_report(status).result
    for part in (run.reason, "[rank 1] exit code 1", "What to do: ", "3 of 60 steps done"):
        assert str(part) in text
    assert "tokens/s" not in text and "MFU" not in text


def test_the_text_names_few_of_many_stacks() -> None:
    stacks = {f"logs/rank{rank}.stack": "at work" for rank in range(1024)}
    text = printed(replace(failed_report(), stacks=stacks))
    assert "logs/rank3.stack and 1,020 more" in text and "rank4" not in text


def test_a_page_says_why_there_is_no_interval() -> None:
    result = report().result
    assert result.window is not None
    bare = {
        name: metric.model_copy(update={"low": None, "high": None})
        for name, metric in result.metrics.items()
    }
    uneven = result.window.model_copy(update={"state": "uneven"})
    assert "Too few steps for an interval." in markdown(run_document(report(metrics=bare)))
    document = run_document(report(metrics=bare, window=uneven))
    assert "No interval: step time is not stationary." in markdown(document)


def test_the_days_of_a_training_come_with_its_tokens() -> None:
    days = Metric(value=12.0, unit="days", note="for 15T tokens")
    run = report(metrics={**report().result.metrics, "days_to_train": days})
    assert "12.00 days for the whole training, 15T tokens" in run_figures(run)[0].details


def test_a_single_step_gives_no_figure_and_says_so() -> None:
    assert "No figure: 1 step (1, too few for a figure)" in printed(single_step_report())


def test_unknown_figures_are_left_out_and_never_printed_as_none() -> None:
    result = report().result
    blank = {name: m.model_copy(update={"value": None}) for name, m in result.metrics.items()}
    text = printed(report(metrics=blank, straggler=None))
    assert "None" not in text and "nan" not in text and "No figure" in text


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_printed_without_terminal_sequences(text: str) -> None:
    assert "\x1b" not in printed(hostile_report(text))
    assert "\x1b" not in printed(failed_report("failed", reason=text, log_tail=(text, text)))


def test_csv_holds_every_metric_at_full_precision_with_its_steps() -> None:
    result = report().result
    rows = {row["name"]: row for row in csv_rows(report())}
    assert list(rows) == list(result.metrics)
    for name, row in rows.items():
        value = result.metrics[name].value
        assert (row["value"] == "") if value is None else (float(row["value"]) == value)
        assert (row["unit"], row["run"]) == (result.metrics[name].unit, result.run)
    assert re.fullmatch(r"\d+-60", rows["step_time_s"]["window"])
    assert rows["step_time_s"]["window_rule"] == "auto"
    assert rows["startup_s"]["window"] == rows["startup_s"]["window_rule"] == ""
    assert 0 < float(rows["achievable_fraction"]["value"]) < 1


def test_csv_of_a_run_without_figures_still_names_the_run_and_its_status() -> None:
    assert [(row["status"], row["name"]) for row in csv_rows(failed_report("oom"))] == [("oom", "")]


def test_values_that_are_not_finite_are_unknown() -> None:
    metric = Metric(value=math.nan, unit="s", spread=math.inf, low=math.nan, high=1.0)
    (row,) = metric_rows(report(metrics={"step_time_s": metric}).result)
    assert (row["value"], row["spread"], row["low"], row["high"]) == (None, None, None, 1.0)


@given(
    st.sampled_from("=+-@"),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
    st.sampled_from(["", " ", "\t", "\n", "  \n"]),
)
@settings(deadline=None)
def test_no_text_in_csv_starts_a_formula_and_no_number_becomes_text(
    sign: str, rest: str, space: str
) -> None:
    text = space + sign + rest
    fields = {"note": text, "source": text, "convention": text, "statistic": text}
    metric = Metric(value=-1.0, unit=text, **fields)
    (row,) = csv_rows(report(metrics={text: metric}))
    assert all(row[name].startswith("'") for name in ("name", "unit", *fields))
    assert float(row["value"]) == -1.0


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_no_text_breaks_out_of_its_markdown_cell(text: str) -> None:
    metric = Metric(value=1.0, unit=text, note=text, source=text, convention=text, statistic=text)
    markdown = render(run_document(report(metrics={text: metric})), ReportFormat.md)
    row = markdown[markdown.index("### All metrics") :].splitlines()[4]
    assert len(re.findall(r"(?<!\\)\|", row.replace(r"\\", ""))) == 9
