"""`paceline runs import`: store a training log as a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.log_options import LogOptions
from paceline.cli.output import TableFormat, emit, emit_table
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.units import pluralize
from paceline.files.archive import is_archive
from paceline.files.run_folder import runs_root
from paceline.report.document import Column
from paceline.report.run_document import run_document
from paceline.runs.bundles.archive_import import ImportedArchive, import_archive, import_bundle
from paceline.runs.bundles.verification import is_bundle
from paceline.runs.flow import command_line
from paceline.runs.log_import import import_log as store


def import_log(
    path: Annotated[
        Path,
        typer.Argument(
            help="Log file (plain or gzipped), bundle, or archive of logs (.tar.gz, .tar.zst)."
        ),
    ],
    tag: options.Tag = None,
    reimport: Annotated[
        bool, typer.Option("--reimport", help="Import the log even if it was imported before.")
    ] = False,
    runs_dir: options.RunsDir = None,
    form: options.ReportForm = options.ReportFormat.text,
    as_json: options.Json = False,
    *,
    log: LogOptions,
) -> None:
    """Store a training log as a run for `compare`, `explain` and all commands of `runs`.

    The raw log is copied into the run folder, without secrets. Settings that the log does not
    state are added with options, as for `parse`.

    A bundle is stored unchanged. In any other archive, e.g. from `llmb-run archive`, every
    training log becomes a run, and its path in the archive supplies missing settings.

    Example: paceline runs import train.log --model llama31-8b --device B200 --gpus 8 --seq-len 8192
    """
    settings = log.settings()
    form = options.ReportFormat.json if as_json else form
    root = runs_root(runs_dir)
    if is_archive(path) and not is_bundle(path):
        archive = import_archive(path, settings, root, command_line(), tag=tag, reimport=reimport)
        _print_archive(archive, form)
        return
    if is_archive(path):
        emit(run_document(import_bundle(path, root, reimport)), form)
        return
    report = store(path, settings, root, command_line(), tag=tag, reimport=reimport)
    emit(run_document(report), form)


def _print_archive(archive: ImportedArchive, form: options.ReportFormat) -> None:
    """Print a row per imported log, and to standard error what was left out."""
    if form is options.ReportFormat.html:
        raise UserError("--format html", "shows a single run", remedy="`paceline runs report RUN`")
    for reason in archive.left_out:
        echo(f"left out: {reason}", err=True)
    if archive.passed_over:
        echo(f"not a training log: {pluralize(archive.passed_over, 'file')}", err=True)
    results = [report.result for report in archive.reports]
    document = {
        "runs": [result.model_dump(mode="json") for result in results],
        "left_out": list(archive.left_out),
        "passed_over": archive.passed_over,
    }
    rows = [
        {"run": result.run, "status": result.status, "log": report.command}
        for result, report in zip(results, archive.reports, strict=True)
    ]
    columns = [Column(name, name) for name in ("run", "status", "log")]
    emit_table(rows, columns, TableFormat(form.value), document=document)
