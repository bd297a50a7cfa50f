"""Tables on standard output in the four formats that every verb offers."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.terminal import clean, echo
from paceline.core.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from altair import LayerChart


class TableFormat(StrEnum):
    """Forms in which a table is printed."""

    text = "text"
    json = "json"
    csv = "csv"
    md = "md"


TableForm = Annotated[
    TableFormat, typer.Option("--format", help="json and csv are unrounded, in base units.")
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where", metavar="COLUMN=VALUE", help="Only rows in which a column has a value."
    ),
]
Row = Mapping[str, Any]
IfNone = Literal["refuse", "tell", "accept"]
"""What follows where no row meets a condition."""
MOST_VALUES = 20
"""Values of a column that are named."""

LEAST_WIDTH = 8
"""Of the last column in a table on a terminal."""


@dataclass(frozen=True)
class OutputColumn:
    """One column: the row's key, and how text and Markdown show it (csv, json: unrounded)."""

    key: str
    title: str
    format: Callable[[Any], str] = str
    justify: Literal["left", "right"] = "left"
    wraps: bool = False
    """Whether the last column, when the terminal is narrow, takes more lines or is cut."""


def emit_table(
    rows: Sequence[Row],
    columns: Sequence[OutputColumn],
    form: TableFormat,
    *,
    document: object = None,
) -> None:
    """Write `rows` to standard output: a rich table on a terminal, plain aligned text in a pipe.

    JSON is `document` if there is one, else the rows as they are. None shows as `-`, in csv as an
    empty field.
    """
    if form is TableFormat.json:
        emit_json(rows if document is None else document)
    elif form is TableFormat.csv:
        echo(_csv(rows, columns), nl=False)
    elif form is TableFormat.md:
        echo(_markdown(rows, columns))
    elif _on_terminal():
        _print_rich(rows, columns)
    else:
        echo(_plain(rows, columns))


def select_rows(
    rows: Sequence[Row],
    where: list[str] | None,
    names: Sequence[str] = (),
    if_none: IfNone = "refuse",
) -> list[Row]:
    """The rows that meet every `column=value`; raises UserError for an unknown column.

    `names` are the columns of a table that may have no rows. Where no row has a value, those that
    exist are named: in a UserError, or beside an empty answer (`tell`), which runs and findings may
    have; `accept` says nothing.
    """
    selected, names = list(rows), list(rows[0]) if rows else names
    conditions = [_condition(text, names) for text in where or []]
    for column, value in conditions:
        meeting = [row for row in selected if str(row[column]).lower() == value.lower()]
        if selected and not meeting and if_none != "accept":
            _without_rows(column, value, selected, if_none)
        selected = meeting
    return selected


def _condition(text: str, names: Sequence[str]) -> tuple[str, str]:
    """Column and value of one condition."""
    column, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--where {text}", "is not column=value")
    if column not in names:
        raise UserError(
            f"--where {text}",
            "is not a column",
            allowed=", ".join(names),
            remedy=did_you_mean(column, names) or None,
        )
    return column, value


def _without_rows(column: str, value: str, rows: Sequence[Row], if_none: IfNone) -> None:
    """Say which values there are instead."""
    values = list(dict.fromkeys(str(row[column]) for row in rows))
    more = f" and {len(values) - MOST_VALUES} more" if len(values) > MOST_VALUES else ""
    nothing = UserError(
        f"--where {column}={value}",
        f"no row has it among {len(rows)}",
        allowed=", ".join(values[:MOST_VALUES]) + more,
        remedy=did_you_mean(value, values) or None,
    )
    if if_none == "refuse":
        raise nothing
    echo(f"note: {nothing}", err=True)


def refuse_where(where: list[str] | None, name: str) -> None:
    """Raise UserError when rows are selected although one thing alone is asked for by `name`."""
    if where:
        raise UserError(
            f"--where {where[0]}",
            f"selects rows of the list, not of {name!r}",
            remedy="leave out the name or --where",
        )


def print_sentences(sentences: Iterable[str], form: TableFormat) -> None:
    """The answer in sentences before its table, in the forms that people read."""
    if form in (TableFormat.text, TableFormat.md):
        for sentence in sentences:
            echo(sentence if form is TableFormat.text else f"- {sentence}")
        echo("")


def write_page(path: Path, page: str) -> None:
    """Write a page and say where; raises SystemFaultError if it cannot be written."""
    from paceline.files.documents import write_text  # Local as in _csv.

    write_text(path, page)
    echo(f"page: {path}", err=True)


def write_charts(folder: Path, charts: Mapping[str, LayerChart]) -> None:
    """Write charts as SVG and say where, or that there is none to write.

    Raises SystemFaultError if that cannot be.
    """
    from paceline.report.charts import save_all  # Local as in _csv.

    if not charts:
        echo(f"note: {folder}: no chart is written: nothing of this is drawn", err=True)
        return
    for path in save_all(charts, folder, ["svg"]):
        echo(f"chart: {path}", err=True)


def emit_json(document: object) -> None:
    """Write `document` to standard output as JSON, numbers unrounded; NaN is an error."""
    echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _cells(row: Row, columns: Sequence[OutputColumn]) -> list[str]:
    values = [(column, row.get(column.key)) for column in columns]
    return ["-" if value is None else column.format(value) for column, value in values]


def _csv(rows: Sequence[Row], columns: Sequence[OutputColumn]) -> str:
    # Local: numpy and pydantic below it take longer to import than `paceline version` runs.
    from paceline.report.tables import csv_cell

    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([column.key for column in columns])
    writer.writerows([[csv_cell(row.get(column.key)) for column in columns] for row in rows])
    return buffer.getvalue()


def _markdown(rows: Sequence[Row], columns: Sequence[OutputColumn]) -> str:
    from paceline.report.tables import md_text  # Local as in _csv.

    rule = ["---:" if column.justify == "right" else "---" for column in columns]
    body = [[md_text(cell) for cell in _cells(row, columns)] for row in rows]
    lines = [[column.title for column in columns], rule, *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(rows: Sequence[Row], columns: Sequence[OutputColumn]) -> str:
    lines = [[column.title for column in columns], *(_cells(row, columns) for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.rjust(width) if column.justify == "right" else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in aligned)


def _print_rich(rows: Sequence[Row], columns: Sequence[OutputColumn]) -> None:
    """A table in the terminal's width; only the last column gives way when that is too narrow.

    Where even that is not enough, the terminal may break the lines: no figure is cut.
    """
    console = Console()
    lines = _clean_lines([[c.title for c in columns], *(_cells(row, columns) for row in rows)])
    widths = [max(map(len, cells)) + 2 for cells in zip(*lines, strict=True)]
    if sum(widths[:-1]) + LEAST_WIDTH > console.width:
        echo(_plain(rows, columns))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title, column in zip(lines[0], columns, strict=True):
        table.add_column(title, justify=column.justify, no_wrap=column is not columns[-1])
    for line in lines[1:]:
        cells = zip(line, columns, strict=True)
        table.add_row(*(Text(cell, no_wrap=not c.wraps, overflow="ellipsis") for cell, c in cells))
    console.print(table)


def _clean_lines(lines: list[list[str]]) -> list[list[str]]:
    """The cells as they may reach a terminal; one look at all of them is enough for most tables."""
    together = "\n".join(cell for line in lines for cell in line)
    if clean(together) == together:
        return lines
    return [[clean(cell) for cell in line] for line in lines]
