"""The page of a sweep."""

from __future__ import annotations

from typing import Any

from paceline.core.text import one_line, printable
from paceline.layouts.sweep.charts import sweep_charts
from paceline.layouts.sweep.result import SweepResult
from paceline.layouts.sweep.table import (
    SweepColumn,
    for_people,
    sweep_columns,
    sweep_rows,
    table_note,
)
from paceline.report.html import render_page
from paceline.report.theme import ON_PAGE

MOST_ROWS = 500


def sweep_html(result: SweepResult) -> str:
    """The page of one sweep; it opens without a network, and whatever a user wrote is escaped."""
    columns = sweep_columns(result)
    best = result.best
    varied = [f"{name}: {', '.join(values)}" for name, values in result.dimensions.items()]
    listed = result.model_copy(update={"rows": result.rows[:MOST_ROWS]})
    rows = [for_people(row) for row in sweep_rows(listed)]
    return render_page(
        "sweep.html.j2",
        sweep_charts(result, ON_PAGE),
        name=printable(result.name),
        chip=f"best: {one_line(best.label)}" if best else "no layout has a speed",
        tone="good" if best else "alert",
        setup=[one_line(part) for part in (result.recipe, *varied)],
        sentences=[one_line(sentence) for sentence in result.sentences],
        unfinished=printable(result.halted or ("broken off" if result.interrupted else "")),
        heads=[column.title for column in columns],
        rows=[[_cell(row, column) for column in columns] for row in rows],
        left_out=max(0, len(result.rows) - MOST_ROWS),
        note=table_note(result),
    )


def _cell(row: dict[str, Any], column: SweepColumn) -> str:
    value = row.get(column.key)
    return "-" if value is None or value == "" else one_line(str(column.write(value)))
