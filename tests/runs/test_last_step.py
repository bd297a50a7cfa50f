"""Figures by the rule "last step" are compared only with figures by the same rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.compare.judge import judge
from paceline.compare.published import published_side, row_facts
from paceline.compare.sides import ComparedRun, ComparisonSide
from paceline.core.result import WindowRecord
from paceline.files import references
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from paceline.runs.comparison import ComparisonOptions, compare_runs, compare_with_reference
from paceline.runs.log_import import import_log
from tests.compare.members import metrics_at
from tests.logs.example import megatron_log

TIMES = [13.0, 12.1, *[11.4] * 20]


def figure(folder: Path, name: str, last_s: float, window: str | None = "last") -> str:
    """The JSON output of `paceline parse` for a log whose last step takes `last_s` seconds."""
    log = folder / f"{name}.log"
    log.write_text(megatron_log([*TIMES, last_s]))
    seventy = UserSettings(
        recipe="llama31-70b", device="H100", num_devices=64, dtype="fp8", window=window
    )
    document = parse_log(log, seventy).document
    result = folder / f"{name}.json"
    result.write_text(document.model_dump_json())
    return str(result)


def test_two_results_by_the_last_step_are_compared(tmp_path: Path):
    before, after = figure(tmp_path, "before", 11.0), figure(tmp_path, "after", 11.33)
    judged = compare_runs(tmp_path, before, after, ComparisonOptions())
    assert (judged.verdict, judged.confidence) == ("undecided", "low")
    assert judged.ratio == pytest.approx(1.03)
    assert any("one step (n = 1), of which no spread is known" in why for why in judged.why_low)


def test_the_last_step_is_held_against_a_table_by_that_rule(tmp_path: Path):
    run = figure(tmp_path, "run", 11.0)
    judged = compare_with_reference(tmp_path, run, "llama31-70b-fp8-64", ComparisonOptions())
    assert (judged.verdict, judged.confidence) == ("undecided", "low")
    assert "the source takes its figure from: last step" in judged.notes


def test_the_last_step_against_a_table_of_averages_is_doubted():
    row = references.row("opt-13b-8")
    window = WindowRecord(rule="last", first_step=90, last_step=90, n=1, n_warmup=89, state="short")
    metrics = metrics_at(row.step_time_s or 0.0, jitter=0.0)
    run = ComparedRun("run", "ok", row_facts(row), metrics, window=window)
    judged = judge(published_side(row), ComparisonSide("run", (run,)))
    assert judged.verdict == "undecided"
    assert "run is judged by its last step, the source by many" in judged.why_low


def test_the_last_step_and_many_steps_differ_in_their_window(tmp_path: Path):
    one, many = figure(tmp_path, "one", 11.0), figure(tmp_path, "many", 11.0, None)
    refused = compare_runs(tmp_path, one, many, ComparisonOptions())
    assert (refused.verdict, refused.differing_keys) == ("not comparable", ("window",))
    assert "window the last step against many steps" in refused.sentence
    allowed = compare_runs(tmp_path, one, many, ComparisonOptions(allowed=("window",)))
    assert allowed.ratio == pytest.approx(11.4 / 11.0)
    assert any("different rules" in why for why in allowed.why_low)


def test_an_imported_log_by_the_last_step_says_where_it_lies(tmp_path: Path):
    figure(tmp_path, "run", 11.0)
    user = UserSettings(
        recipe="llama31-70b", device="H100", num_devices=64, dtype="fp8", window="last"
    )
    report = import_log(tmp_path / "run.log", user, tmp_path / "runs", [])
    assert report.result.verdict is not None
    assert "3 runs decide" in report.result.verdict.sentence
