"""Tables and documents on standard output, in the formats of --format."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer
from rich.console import Console

from paceline.cli.options import Json, Panel, ReportFormat
from paceline.cli.terminal import echo
from paceline.core.errors import UserError, did_you_mean, unknown_name
from paceline.core.secrets import redacted_words
from paceline.report.csv_table import csv_text
from paceline.report.document import Column, Document, Row
from paceline.report.markdown import markdown, markdown_table
from paceline.report.terminal import plain_text, print_document, print_table

if TYPE_CHECKING:
    from altair import LayerChart


class TableFormat(StrEnum):
    """Output formats of a table."""

    text = "text"
    json = "json"
    csv = "csv"
    md = "md"


TableForm = Annotated[
    TableFormat,
    typer.Option(
        "--format",
        help="Output format; json and csv are unrounded, in base units.",
        rich_help_panel=Panel.output,
    ),
]
WhereOption = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="COLUMN=VALUE",
        help="Select rows by the value of a column. Repeatable.",
        rich_help_panel=Panel.output,
    ),
]


@dataclass(frozen=True)
class TableOptions:
    """Output format of a verb."""

    panel: ClassVar[Panel] = Panel.output
    form: TableForm = TableFormat.text
    as_json: Json = False

    @property
    def output_format(self) -> TableFormat:
        """Output format from --format or --json."""
        return TableFormat.json if self.as_json else self.form


IfNone = Literal["refuse", "tell", "accept"]
"""Reaction if no row meets a condition."""
MAX_VALUES_LISTED = 20
"""Maximum number of column values that a message lists."""


def emit(
    document: Document,
    form: StrEnum,
    *,
    page: Path | None = None,
    charts: Path | None = None,
    headline: bool = True,
) -> None:
    """Write a document to standard output in any form, and its page and charts to files.

    `headline` False leaves out the first line of the text, which the verb has printed before. CSV
    is the document's table. Raises UserError if it has no table, and SystemFaultError for a file
    that cannot be written.
    """
    if form == "text":
        print_document(document, Console(), headline=headline)
    else:
        echo(render(document, form), nl=False)
    emit_files(document, page=page, charts=charts)


def emit_files(document: Document, *, page: Path | None = None, charts: Path | None = None) -> None:
    """Write a document's page and charts to files, and print their paths."""
    if page:
        write_page(page, render(document, ReportFormat.html))
    if charts:
        from paceline.report.theme import EXPORT  # Altair takes long to import.

        write_charts(charts, document.charts(EXPORT) if document.charts else {})


def render(document: Document, form: StrEnum) -> str:
    """Return a document as the content of a file."""
    match str(form):
        case "json":
            return f"{_json(document.data)}\n"
        case "csv":
            table = document.csv_table()
            if table is None:
                raise UserError(
                    f"--format {form}",
                    "is not available, because there is no table",
                    remedy="use another form",
                )
            return csv_text(table.rows, table.columns)
        case "md":
            return markdown(document)
        case "html":
            from paceline.report.html import render_document  # Altair takes long to import.

            return render_document(document, _command_line())
        case _:
            return plain_text(document)


def _command_line() -> str:
    """Return how Paceline was called, without secrets; empty if another program calls this."""
    program, *words = sys.argv
    if Path(program).name not in ("paceline", "__main__.py"):
        return ""
    return shlex.join(["paceline", *redacted_words(words, os.environ)])


def _json(data: Any) -> str:
    if hasattr(data, "model_dump_json"):
        return data.model_dump_json(indent=2)
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)


def emit_table(
    rows: Sequence[Row],
    columns: Sequence[Column],
    form: TableFormat,
    *,
    document: object = None,
) -> None:
    """Write `rows` to standard output: a rich table on a terminal, plain aligned text in a pipe.

    JSON is `document` if given, else the rows. None is shown as `-`, in csv as an empty field.
    """
    if form is TableFormat.json:
        emit_json(rows if document is None else document)
    elif form is TableFormat.csv:
        echo(csv_text(rows, columns), nl=False)
    elif form is TableFormat.md:
        echo(markdown_table(rows, columns))
    else:
        print_table(rows, columns, Console())


def select_rows(
    rows: Sequence[Row],
    where: list[str] | None,
    names: Sequence[str] = (),
    if_none: IfNone = "refuse",
) -> list[Row]:
    """Return the rows that meet every `column=value`; raise UserError for unknown columns.

    `names` are the columns of a table that may have no rows. If no row has a value, the existing
    values are listed: in a UserError (`refuse`) or in a note (`tell`); `accept` prints nothing.
    """
    matching_rows, names = list(rows), list(rows[0]) if rows else names
    conditions = [_parse_condition(text, names) for text in where or []]
    for column, value in conditions:
        next_rows = [row for row in matching_rows if str(row[column]).lower() == value.lower()]
        if matching_rows and not next_rows and if_none != "accept":
            _report_no_match(column, value, matching_rows, if_none)
        matching_rows = next_rows
    return matching_rows


def _parse_condition(text: str, names: Sequence[str]) -> tuple[str, str]:
    """Return column and value of one condition."""
    column, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--where {text}", "is not column=value")
    if column not in names:
        raise unknown_name(f"--where {text}", "is not a column", column, names)
    return column, value


def _report_no_match(column: str, value: str, rows: Sequence[Row], if_none: IfNone) -> None:
    """Report the existing values."""
    values = list(dict.fromkeys(str(row[column]) for row in rows))
    more = f" and {len(values) - MAX_VALUES_LISTED} more" if len(values) > MAX_VALUES_LISTED else ""
    error = UserError(
        f"--where {column}={value}",
        f"matches none of {len(rows):,} rows",
        allowed=", ".join(values[:MAX_VALUES_LISTED]) + more,
        remedy=did_you_mean(value, values) or None,
    )
    if if_none == "refuse":
        raise error
    echo(f"note: {error}", err=True)


def refuse_where(where: list[str] | None, name: str) -> None:
    """Raise UserError if --where is combined with the name of a single item."""
    if where:
        raise UserError(
            f"--where {where[0]}",
            f"selects rows of the whole list, not of {name!r}",
            remedy="leave out either the name or --where",
        )


def write_page(path: Path, page: str) -> None:
    """Write a page and print its path; raise SystemFaultError if that fails."""
    from paceline.files.documents import write_output  # Pydantic below it is slow to import.

    write_output(path, page)
    echo(f"page: {path}", err=True)


def write_charts(folder: Path, charts: Mapping[str, LayerChart]) -> None:
    """Write charts as SVG and print their paths.

    Raises SystemFaultError if they cannot be written.
    """
    from paceline.report.charts import save_all  # Altair takes long to import.

    if not charts:
        echo(f"note: {folder}: no chart is written, because there is nothing to draw", err=True)
        return
    for path in save_all(charts, folder, ["svg"]):
        echo(f"chart: {path}", err=True)


def emit_json(document: object) -> None:
    """Write `document` to standard output as JSON with unrounded numbers; NaN is an error."""
    echo(_json(document))
