"""`paceline table validate`: compare the time model with measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import model_options as model
from paceline.cli.options import Panel
from paceline.cli.output import TableOptions, WhereOption, emit, select_rows
from paceline.core.units import pluralize
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.refit import adjusted_to
from paceline.estimate.validation import (
    StepAccuracy,
    Validation,
    modelled_steps,
    read_table,
    validate_rows,
)
from paceline.files.documents import refuse_unwritable, write_value
from paceline.report.document import Column, Document, Table

MAX_ROWS_LISTED = 10
"""Number of rows listed per reason."""


def validate(
    table: Annotated[
        Path,
        typer.Argument(metavar="CSV", help="CSV file with a row per measured step."),
    ],
    where: WhereOption = None,
    calibration: model.EvidenceFile = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Adjust the time model to the table and write a calibration file; shows the error "
            "on rows left out.",
            rich_help_panel=Panel.time_model,
        ),
    ] = None,
    *,
    output: TableOptions,
) -> None:
    """Predict the step time of every row of a table and compare it with the measured one.

    Examples:

      paceline table validate measured.csv

      paceline table validate measured.csv --where gpu=H100-SXM-80GB --json

      paceline table validate measured.csv --fit ours.json

    Rows that cannot be modelled are listed with the reason. --format csv lists the rows; the other
    formats show the accuracy overall, by kind and by source.
    """
    if fit is not None:
        refuse_unwritable(fit)
    lines = read_table(table)
    selected_rows = [
        dict(row) for row in select_rows(lines, where, list(lines[0]) if lines else ())
    ]
    file_evidence = model.given_evidence(calibration)
    evidence = file_evidence.of_gpus() if file_evidence else shipped_evidence()
    validation = validate_rows(table.name, selected_rows, evidence, refit=fit is not None)
    if fit is not None and validation.rows:
        write_value(fit, adjusted_to(evidence, modelled_steps(selected_rows), table.name))
    rows = [row.model_dump(mode="json") for row in validation.rows]
    answer = Document(
        kind="predicted and measured step times",
        title=table.name,
        answer=() if rows else (_why_empty(validation),),
        sections=(Table(columns=_COLUMNS, rows=_scores(validation)),),
        notes=tuple(_notes(validation, fit)),
        data=validation,
        csv=Table(columns=[Column(key, key) for key in _ROW_KEYS], rows=rows),
    )
    emit(answer, output.output_format)


def _scores(validation: Validation) -> list[dict[str, Any]]:
    rows = [_row("all", validation.overall)]
    if validation.left_out:
        rows.append(_row("all, left out of the fit", validation.left_out))
    rows += [_row(f"kind {name}", score) for name, score in validation.by_kind.items()]
    sources = validation.by_source.items()
    return rows + [_row(name or "source not stated", score) for name, score in sources]


def _row(name: str, score: StepAccuracy) -> dict[str, Any]:
    return {"rows of": name, **score.model_dump(mode="json")}


def _why_empty(validation: Validation) -> str:
    why = "no row could be modelled" if validation.unsupported_rows else "the table has no rows"
    return f"nothing to compare: {why}"


def _notes(validation: Validation, fit: Path | None) -> Iterator[str]:
    """Yield notes on the coefficients, the memory accuracy and the rows left out."""
    yield f"predicted by: {validation.evidence}"
    if fit is not None and validation.left_out:
        yield f"adjusted coefficients: {fit}; use them with --calibration {fit}"
    memory = validation.memory
    if memory.mape is not None and memory.median is not None and memory.within_10 is not None:
        yield (
            f"memory stated by {pluralize(memory.n, 'row')}: MAPE {_share(memory.mape)}, "
            f"median {_share(memory.median)}, within 5% {_share(memory.within_5 or 0)}, "
            f"within 10% {_share(memory.within_10)}"
        )
    reasons = Counter(row.reason for row in validation.unsupported_rows)
    for reason, count in reasons.most_common():
        row_ids = [row.id for row in validation.unsupported_rows if row.reason == reason]
        more = (
            f" and {count - MAX_ROWS_LISTED:,} more (--json has all)"
            if count > MAX_ROWS_LISTED
            else ""
        )
        which = f"{', '.join(row_ids[:MAX_ROWS_LISTED])}{more}"
        yield f"not modelled: {pluralize(count, 'row')}: {reason}: {which}"


def _share(value: float) -> str:
    return f"{value:.1%}"


_ROW_KEYS = ("id", "source", "kind", "measured_s", "predicted_s", "low_s", "high_s", "error")
_COLUMNS = [
    Column("rows of", "rows of"),
    Column("n", "n", justify="right"),
    Column("mape", "MAPE", _share, "right"),
    Column("median", "median |ln|", lambda value: f"{value:.3f}", "right"),
    Column("within_10", "within 10%", _share, "right"),
    Column("within_20", "within 20%", _share, "right"),
    Column("coverage_80", "in 80% interval", _share, "right"),
    Column("flat_mape", "45 %-of-peak rule", _share, "right"),
]
