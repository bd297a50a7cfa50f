"""`paceline validate`: the time model against published measurements."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import model_options as model
from paceline.cli.options import Json
from paceline.cli.output import OutputColumn, TableForm, TableFormat, Where, emit_table, select_rows
from paceline.cli.terminal import echo
from paceline.core.units import counted
from paceline.estimate.fit.evidence import shipped
from paceline.estimate.validation import StepAccuracy, Validation, read_table, validate_rows

LISTED = 10
"""Rows that a reason for leaving them out names."""


def validate(
    table: Annotated[
        Path, typer.Argument(metavar="CSV", help="A table with the columns of docs/estimate.md.")
    ],
    where: Where = None,
    evidence: model.EvidenceFile = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Predict the step time of every row and compare it with what was measured.

    Examples:

      paceline validate measured.csv

      paceline validate measured.csv --where gpu=H100-SXM-80GB --json

    Rows that cannot be modelled are listed with the reason. csv lists the rows, the other forms the
    scores, overall, by source and by kind.
    """
    lines = read_table(table)
    chosen = [dict(row) for row in select_rows(lines, where, list(lines[0]) if lines else ())]
    given = model.given_evidence(evidence)
    validation = validate_rows(table.name, chosen, given.of_gpus() if given else shipped())
    form = TableFormat.json if as_json else form
    if form is TableFormat.csv:
        rows = [row.model_dump(mode="json") for row in validation.rows]
        emit_table(rows, [OutputColumn(key, key) for key in _ROW_KEYS], form)
        return
    emit_table(_scores(validation), _COLUMNS, form, document=validation.model_dump(mode="json"))
    if form is not TableFormat.json:
        _tell(validation)


def _scores(validation: Validation) -> list[dict[str, Any]]:
    rows = [_row("all", validation.overall)]
    rows += [_row(f"kind {name}", score) for name, score in validation.by_kind.items()]
    sources = validation.by_source.items()
    return rows + [_row(name or "source not stated", score) for name, score in sources]


def _row(name: str, score: StepAccuracy) -> dict[str, Any]:
    return {"rows of": name, **score.model_dump(mode="json")}


def _tell(validation: Validation) -> None:
    if not validation.rows:
        why = "no row could be modelled" if validation.unmodelled else "the table has no rows"
        echo(f"nothing to compare: {why}", err=True)
    echo(f"predicted by: {validation.evidence}", err=True)
    memory = validation.memory
    if memory.mape is not None and memory.median is not None and memory.within_10 is not None:
        within_5 = _share(memory.within_5 or 0)
        echo(
            f"memory stated by {counted(memory.n, 'row')}: MAPE {_share(memory.mape)}, "
            f"median {_share(memory.median)}, within 5 % {within_5}, "
            f"within 10 % {_share(memory.within_10)}",
            err=True,
        )
    reasons = Counter(row.reason for row in validation.unmodelled)
    for reason, count in reasons.most_common():
        named = [row.id for row in validation.unmodelled if row.reason == reason]
        more = f" and {count - LISTED:,} more (--json has all)" if count > LISTED else ""
        which = f"{', '.join(named[:LISTED])}{more}"
        echo(f"not modelled: {counted(count, 'row')}: {reason}: {which}", err=True)


def _share(value: float) -> str:
    return f"{value:.1%}"


_ROW_KEYS = ("id", "source", "kind", "measured_s", "predicted_s", "low_s", "high_s", "error")
_COLUMNS = [
    OutputColumn("rows of", "rows of"),
    OutputColumn("n", "n", justify="right"),
    OutputColumn("mape", "MAPE", _share, "right"),
    OutputColumn("median", "median |ln|", lambda value: f"{value:.3f}", "right"),
    OutputColumn("within_10", "within 10 %", _share, "right"),
    OutputColumn("within_20", "within 20 %", _share, "right"),
    OutputColumn("coverage_80", "in 80 % interval", _share, "right"),
    OutputColumn("flat_mape", "45 %-of-peak rule", _share, "right"),
]
