"""The history as text that reads well, as Markdown and as rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.compare.over_time.timeline import History
from paceline.files.run_folder import run_folders
from paceline.runs.history import recipe_history
from paceline.runs.history_text import (
    BLOCKS,
    STEP_MARK,
    history_lines,
    history_md,
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
    assert 1 <= len(sparkline([around(0.2, n)], widest=72)) <= 72


def test_the_text_says_when_how_much_and_with_what(changed: History):
    text = "\n".join(history_lines(changed))
    assert "example · step_time_s · 15 runs" in text
    assert "2026-10-09  2." in text and "% slower (+" in text and "8 runs before, 7 after" in text
    assert "changed between 2026-10-08 03:00 and 2026-10-09 03:00:" in text
    assert "kernel  6.8.0-40 -> 6.9" in text
    assert "in 9 of 10 cases" in text


def test_nothing_that_was_recorded_reaches_the_terminal_as_a_command(tmp_path: Path):
    make_many(tmp_path, OLD)
    for number, time in enumerate(NEW, start=8):
        make_finished(tmp_path, number, time, machine={"kernel": "6.9\x1b[2J\r\n| x |"})
    history = recipe_history("example", run_folders(tmp_path))
    assert "\x1b" not in "".join((*history_lines(history), *history_md(history)))
    assert "| x |" not in "\n".join(history_md(history))


def test_markdown_is_two_tables_in_which_nothing_is_markup(changed: History):
    text = "\n".join(history_md(changed))
    assert text.startswith("**example**, `step_time_s`: 1 change.")
    assert text.count("\n|---|") == 2 and " <img" not in text
    assert "kernel 6.8.0-40 → 6.9" in text


def test_every_value_is_a_row_and_the_first_after_a_step_has_its_size(changed: History):
    rows = history_rows(changed)
    assert len(rows) == 15 and [r["ratio"] is not None for r in rows].index(True) == 8
    assert sum(r["ratio"] is not None for r in rows) == 1
    assert rows[0]["level"] < rows[-1]["level"] and rows[0]["series"] == 1


def test_the_text_of_a_drift_and_of_no_change(tmp_path: Path):
    make_many(tmp_path, [t * (1 - 0.001 * day) for day, t in enumerate(around(0.2, 30, seed=3))])
    drifting = recipe_history("example", run_folders(tmp_path))
    text = "\n".join(history_lines(drifting))
    assert "slow drift: the last value is" in text and "% faster than the first" in text
    assert "slow drift" in "\n".join(history_md(drifting))
    still = recipe_history("example", run_folders(tmp_path)[:3])
    assert "too few runs" in "\n".join(history_lines(still))


def test_a_metric_without_a_better_direction_is_higher_or_lower(tmp_path: Path):
    make_many(tmp_path, [*OLD, *NEW])
    text = "\n".join(history_lines(recipe_history("example", run_folders(tmp_path), "loss_last")))
    assert "no change" in text and "slower" not in text


def test_no_figure_at_all_is_told(tmp_path: Path):
    make_many(tmp_path, OLD)
    history = recipe_history("example", run_folders(tmp_path), "mfu")
    assert next(history_lines(history)).endswith("no run has a figure")
    assert "8 runs without mfu" in "\n".join(history_lines(history))
    assert "8 runs without mfu" in "\n".join(history_md(history))
