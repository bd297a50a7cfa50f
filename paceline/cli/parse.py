"""`paceline parse`: read training logs of any framework."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from paceline.cli.log_options import LogOptions
from paceline.cli.options import Json, Panel
from paceline.cli.output import (
    Row,
    TableForm,
    TableFormat,
    WhereOption,
    emit_json,
    emit_table,
    select_rows,
)
from paceline.cli.terminal import echo
from paceline.core.text import one_line
from paceline.core.units import percent, significant
from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import ParsedLog
from paceline.logs.parser import STANDARD_INPUT, Parsing, log_files, parse_log, standard_input
from paceline.report.document import Column
from paceline.report.logs import (
    STEP_COLUMNS,
    log_lines,
    log_row,
    step_csv,
    step_json,
    step_rows,
)

MAX_WARNINGS = 3
"""Warnings that are printed without --verbose."""


def parse(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Log files or folders, plain or gzipped; - reads standard input."),
    ],
    per_step: Annotated[
        bool,
        typer.Option(
            "--per-step",
            help="Print every step instead of the summary.",
            rich_help_panel=Panel.output,
        ),
    ] = False,
    fail_on_findings: Annotated[
        bool,
        typer.Option(
            help="Exit with 3 if a log is incomplete or contradicts itself.",
            rich_help_panel=Panel.criteria,
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Print every warning.", rich_help_panel=Panel.output),
    ] = False,
    where: WhereOption = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
    *,
    log: LogOptions,
) -> None:
    """Read training logs and report how fast the runs were.

    The log format is detected: NeMo, Megatron, DeepSpeed, torchtitan, Hugging Face Trainer,
    MaxText, MLPerf and more (`paceline formats`). What a log does not
    state can be added with options; nothing is guessed.

    Examples:

      paceline parse train.log --model llama31-8b --device B200 --gpus 8 --seq-len 8192

      paceline parse logs/ --where status=ok --format csv

      paceline parse train.log --window 35:44 --json      iterations 35 to 44, both included

      paceline parse train.log.gz --per-step --format csv > steps.csv

    Figures that the log itself prints are shown next to the computed ones; a disagreement is
    reported with its likely cause. Exit code 1 if a single file cannot be read; a file that is not
    a training log is not an error.
    """
    settings = log.settings()
    form = TableFormat.json if as_json else form
    single = len(paths) == 1 and not paths[0].is_dir()
    parsings = _parse_logs(paths, settings, one_of_many=not single)
    if per_step:
        documents = _emit_steps(_matching_logs(parsings, where), form, single)
    else:
        documents = list(map(attrgetter("document"), parsings))
        _emit(documents, form, single, where, None if verbose else MAX_WARNINGS)
    if not documents:
        echo(f"note: {', '.join(map(str, paths))}: contains no file", err=True)
    if single and any(d.status == "unreadable" for d in documents):
        raise typer.Exit(1)
    if fail_on_findings and any(d.status != "ok" or d.disagreements for d in documents):
        raise typer.Exit(3)


def _parse_logs(paths: list[Path], settings: UserSettings, one_of_many: bool) -> Iterator[Parsing]:
    """Yield each log in turn, to keep only one in memory; show a bar for several."""
    with standard_input(paths) as copy:
        files = log_files(paths)
        console = Console(stderr=True)
        quiet = len(files) < 2 or not sys.stderr.isatty()
        for path in track(files, "reading logs", console=console, transient=True, disable=quiet):
            source = copy if path == STANDARD_INPUT else path
            yield parse_log(source, settings, display_path=path, one_of_many=one_of_many)


def _matching_logs(parsings: Iterator[Parsing], where: list[str] | None) -> Iterator[Parsing]:
    """Return the logs whose rows meet every condition."""
    return (p for p in parsings if select_rows([log_row(p.document)], where, (), "accept"))


def _emit(
    documents: list[ParsedLog],
    form: TableFormat,
    single: bool,
    where: WhereOption,
    max_warnings: int | None,
) -> None:
    if single and form is TableFormat.json and not where:
        emit_json(documents[0].model_dump(mode="json"))
        return
    rows = [log_row(document) for document in documents]
    if single and form is TableFormat.text and not where:
        echo("\n".join(log_lines(documents[0], max_warnings)))
        return
    matching_rows = select_rows(rows, where, list(log_row(None)), "tell")
    matching_documents = [
        d.model_dump(mode="json")
        for d, row in zip(documents, rows, strict=True)
        if row in matching_rows
    ]
    if form is TableFormat.csv:
        emit_table(matching_rows, [Column(name, name) for name in log_row(None)], form)
    else:
        emit_table(matching_rows, _columns(matching_rows), form, document=matching_documents)


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that have a figure in some row, because a terminal is narrow."""
    columns = [
        Column("engine", "engine"),
        Column("status", "status"),
        Column("n_steps", "steps", "{:,}".format, "right"),
        Column("step_time_s", "step s", lambda v: significant(v, 4), "right"),
        Column("spread", "spread", percent, "right"),
        Column("tokens_per_s", "tokens/s", "{:,.0f}".format, "right"),
        Column("samples_per_s", "samples/s", lambda v: significant(v, 4), "right"),
        Column("tflops_per_device", "TFLOP/s", lambda v: significant(v, 4), "right"),
        Column("mfu", "MFU", percent, "right"),
        Column("findings", "findings", str, "right"),
        Column("file", "file", one_line),
    ]
    rates = {"spread", "tokens_per_s", "samples_per_s", "tflops_per_device", "mfu", "findings"}
    return [c for c in columns if c.key not in rates or any(row[c.key] for row in rows)]


def _emit_steps(parsings: Iterator[Parsing], form: TableFormat, single: bool) -> list[ParsedLog]:
    """Print the steps of each log; csv and json are streamed."""
    documents: list[ParsedLog] = []
    rows: list[dict[str, Any]] = []
    as_list = form is TableFormat.json and not single
    sys.stdout.write("[" * as_list)
    for parsing in parsings:
        document, first = parsing.document, not documents
        if form is TableFormat.csv:
            file = None if single else document.file
            sys.stdout.writelines(step_csv(parsing.steps, file, header=first))
        elif form is TableFormat.json:
            sys.stdout.write("" if first else ",\n")
            sys.stdout.writelines(step_json(document.file, document.status, parsing.steps))
        else:
            rows += [{"file": document.file, **row} for row in step_rows(parsing.steps)]
        documents.append(document)
        del parsing  # The next log needs the memory.
    if form in (TableFormat.text, TableFormat.md):
        names = [n for n in STEP_COLUMNS if any(row.get(n) is not None for row in rows)]
        columns = [] if single else [Column("file", "file", one_line)]
        emit_table(rows, [*columns, *(Column(n, n, justify="right") for n in names)], form)
    elif form is TableFormat.json:
        sys.stdout.write("]\n" if as_list else "\n")
    return documents
