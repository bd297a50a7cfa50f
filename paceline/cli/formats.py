"""`paceline formats`: list and explain log formats, and try one on a file."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.log_options import EngineName
from paceline.cli.options import Json
from paceline.cli.output import (
    TableForm,
    TableFormat,
    WhereOption,
    emit_json,
    emit_table,
    refuse_where,
    select_rows,
)
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.text import one_line
from paceline.engines import format_table, log_format, log_formats
from paceline.engines.log_reading.generic import NAME as GENERIC
from paceline.engines.log_reading.log_content import LogFormat, excerpt
from paceline.engines.log_reading.records import without_colors
from paceline.engines.log_reading.table_format import FormatTable, compile_pattern, placeholders
from paceline.files.log_file import LogFile
from paceline.logs.facts import UserSettings
from paceline.logs.parser import detect, parse_log
from paceline.report.document import Column
from paceline.report.logs import log_lines

TRY = "try"
PER_DEVICE = {"tokens_per_s_per_device", "tokens_per_s_per_rank", "tflops_per_device", "mfu"}
ALL_DEVICES = {"tokens_per_s", "mean_tokens_per_s", "samples_per_s", "tokens", "total_tokens"}


def formats(
    name: Annotated[
        str | None,
        typer.Argument(help="Log format to explain, or `try` to apply one to FILE."),
    ] = None,
    file: Annotated[Path | None, typer.Argument(help="Log, after `try`.")] = None,
    engine: EngineName = None,
    where: WhereOption = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """List the log formats that `parse` recognizes, explain one, or try one on a file.

    Examples:

      paceline formats

      paceline formats nanogpt

      paceline formats try train.log --log-format my.yaml
    """
    form = TableFormat.json if as_json else form
    if name == TRY:
        if file is None:
            raise UserError("formats try", "needs a log", remedy="`paceline formats try FILE`")
        refuse_where(where, TRY)
        _try(file, engine, form)
    elif file is not None:
        raise UserError(
            f"formats {name}",
            f"does not take a file ({file})",
            remedy="`paceline formats try FILE`",
        )
    elif name is not None:
        refuse_where(where, name)
        row = _row(name, log_format(name))
        if form is TableFormat.json:
            emit_json(row)
            return
        if form is not TableFormat.text:
            emit_table([row], [Column(key, key) for key in row], form)
            return
        width = max(map(len, row))
        echo("\n".join(f"{key.replace('_', ' '):{width}}  {value}" for key, value in row.items()))
    else:
        rows = [_row(each, kind) for each, kind in log_formats().items()]
        emit_table(select_rows(rows, where), _COLUMNS, form)


def _row(name: str, kind: LogFormat) -> dict[str, Any]:
    """Return what a log format is: its program, its steps, and what its figures cover."""
    table = format_table(name)
    if table is None:
        module = sys.modules[inspect.unwrap(getattr(kind.read, "func", kind.read)).__module__]
        source, figures = inspect.getdoc(module) or "", inspect.getdoc(kind.read) or ""
    else:
        source, figures = table.source, _figures(table)
    return {
        "name": name,
        "program": kind.title,
        "source": one_line(" ".join(source.split())),
        "step_line": kind.example.replace("`", ""),
        "step_number": kind.numbering,
        "figures": one_line(" ".join(figures.split())),
        "convention": kind.convention or "-",
    }


def _figures(table: FormatTable) -> str:
    """Return which devices the figures of a table cover, and the number of steps per line."""
    names = {name for text in (table.line, *table.fields) for name in placeholders(text)}
    covers = [
        f"{', '.join(sorted(names & group))}: {meaning}"
        for group, meaning in ((PER_DEVICE, "per device"), (ALL_DEVICES, "all devices"))
        if names & group
    ]
    averaged = table.steps_per_line or "the difference of the step numbers"
    return "; ".join([*covers, f"steps per line: {averaged}"])


def _try(path: Path, name: str | None, form: TableFormat) -> None:
    """Print which lines of a log match which pattern, and what was read of it."""
    if not path.is_file():
        raise UserError(str(path), "does not exist" if not path.exists() else "is not a file")
    name = name or detect(LogFile(path))
    document = parse_log(path, UserSettings(engine=name)).document
    rows = _matches(path, name) if name else []
    if form is TableFormat.json:
        read = document.model_dump(mode="json")
        emit_json({"format": name or GENERIC, "patterns": rows, "read": read})
        return
    if rows or form is not TableFormat.text:
        emit_table(rows, _MATCH_COLUMNS, form)
    if form is TableFormat.text:
        echo("\n".join(log_lines(document)))


def _matches(path: Path, name: str) -> list[dict[str, Any]]:
    """Return a row for each pattern: the number of lines that match, and the first of them."""
    kind, table = log_format(name), format_table(name)
    patterns: list[tuple[str, str, re.Pattern[bytes] | None]] = [
        ("mark", mark.decode(), None) for mark in kind.marks
    ]
    if table is None:
        patterns.append(("line", kind.example.replace("`", ""), kind.step_line))
    else:
        parts = (("line", (table.line,)), ("field", table.fields))
        parts += (("setting", table.settings), ("figure", table.figures))
        patterns += [
            (part, text, compile_pattern(text)[0]) for part, texts in parts for text in texts
        ]
    counts, first = [0] * len(patterns), [""] * len(patterns)
    for block in LogFile(path):
        for line in without_colors(block).replace(b"\r", b"\n").split(b"\n"):
            for n, (_, text, pattern) in enumerate(patterns):
                match = pattern.search(line) if pattern else None
                if match or (pattern is None and text.encode() in line):
                    counts[n] += 1
                    values = [value for value in (match.groups() if match else ()) if value]
                    first[n] = first[n] or excerpt(b" ".join(values) or line)
    return [
        {"part": part, "pattern": text, "lines": count, "first": value}
        for (part, text, _), count, value in zip(patterns, counts, first, strict=True)
    ]


_COLUMNS = [
    Column("name", "format"),
    Column("program", "program"),
    Column("step_line", "a step line looks like"),
    Column("step_number", "step number"),
    Column("convention", "printed FLOP/s count"),
]
_MATCH_COLUMNS = [
    Column("part", "part"),
    Column("pattern", "pattern"),
    Column("lines", "lines", "{:,}".format, "right"),
    Column("first", "first value or line"),
]
