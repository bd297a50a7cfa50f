"""The history as text that reads well, as Markdown and as rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.options import ReportFormat
from paceline.cli.output import render
from paceline.compare.over_time.step_changes import History
from paceline.files.run_folder import run_folders
from paceline.runs.history import recipe_history
from paceline.runs.history_report import (
    BLOCKS,
    STEP_MARK,
    history_document,
    history_rows,
    sparkline,
)
from tests.report.example import HOSTILE
from tests.runs.series_example import around, make_finished, make_many

OLD, NEW = around(0.2, 8, seed=1), around(0.206, 7, seed=2)


@pytest.fixture
def changed(tmp_path: Path) -> History:
    """Eight runs, a kernel and another host, and seven slower ones."""
    make_many(tmp_path, OLD)
    for number, time in enumerate(NEW, start=8):
        make_finished(tmp_path, number, time, machine={"kernel": "6.9", "host": HOSTILE})
    return recipe_history("example", run_folders(tmp_path))


def test_a_series_is_drawn_from_low_to_high_with_a_mark_at_the_step():
    drawn = sparkline([[1.0, 1.0, 1.1], [1.9, 2.0]])
    assert drawn[3] == STEP_MARK and drawn[0] == BLOCKS[0] and drawn[-1] == BLOCKS[-1]
    assert len(drawn) == 6


def test_scatter_does_not_fill_the_height():
    heights = {BLOCKS.index(block) for block in sparkline([around(0.2, 40, spread=0.002)])}
    assert heights <= {2, 3, 4, 5}


def test_a_flat_series_is_drawn_flat():
    assert len(set(sparkline([[0.25] * 9]))) == 1


@pytest.mark.parametrize("n", [1, 72, 73, 1000, 5000])
def test_a_long_series_is_drawn_in_one_line(n: int):
    assert 1 <= len(sparkline([around(0.2, n)], max_width=72)) <= 72


def text_of(history: History, form: ReportFormat = ReportFormat.text) -> str:
    return render(history_document(history), form)


def test_the_newest_change_has_its_size_its_date_and_what_changed_with_it(changed: History):
    document = history_document(changed)
    now, change, noise, runs = document.figures
    assert now.value.startswith("0.2") and "% slower" in change.value and "(95%)" in change.interval
    assert change.details[:2] == ("on 2026-10-09", "8 runs before, 7 after")
    assert "in 9 of 10 cases" in noise.details[-1] and runs.value == "15"
    assert document.verdict is not None and document.verdict.tone == "alert"
    assert document.answer[0].startswith(f"{change.value} since 2026-10-09: ")
    assert "kernel 6.8.0-40 → 6.9" in text_of(changed)


def test_nothing_that_was_recorded_reaches_a_terminal_or_markdown_as_a_command(tmp_path: Path):
    make_many(tmp_path, OLD)
    for number, time in enumerate(NEW, start=8):
        make_finished(tmp_path, number, time, machine={"kernel": "6.9\x1b[2J\r\n| x |"})
    history = recipe_history("example", run_folders(tmp_path))
    md = text_of(history, ReportFormat.md)
    assert "\x1b" not in text_of(history) + md and "| x |" not in md


def test_every_value_is_a_row_and_the_first_after_a_step_has_its_size(changed: History):
    rows = history_rows(changed)
    assert len(rows) == 15 and [r["ratio"] is not None for r in rows].index(True) == 8
    assert sum(r["ratio"] is not None for r in rows) == 1
    assert rows[0]["level"] < rows[-1]["level"] and rows[0]["series"] == 1


def test_a_drift_and_no_change_are_shown(tmp_path: Path):
    make_many(tmp_path, [t * (1 - 0.001 * day) for day, t in enumerate(around(0.2, 30, seed=3))])
    text = text_of(recipe_history("example", run_folders(tmp_path)))
    assert "slow drift: the last value is" in text and "% faster than the first" in text
    still = recipe_history("example", run_folders(tmp_path)[:3])
    assert history_document(still).figures[1].details[0].startswith("too few runs")


def test_a_metric_without_a_better_direction_is_higher_or_lower(tmp_path: Path):
    make_many(tmp_path, [*OLD, *NEW])
    text = text_of(recipe_history("example", run_folders(tmp_path), "loss_last"))
    assert "no change" in text and "slower" not in text


def test_a_history_without_any_value_says_why(tmp_path: Path):
    make_many(tmp_path, OLD)
    document = history_document(recipe_history("example", run_folders(tmp_path), "mfu"))
    assert document.verdict is not None and document.verdict.text == "no run has a value"
    assert document.figures[-1].details == ("8 runs without mfu",)
