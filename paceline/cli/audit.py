"""`paceline table audit`: find inconsistent figures in published tables."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.audit.conversion import read_flops_per_s
from paceline.audit.tables import Audit, AuditFinding
from paceline.audit.tables import audit as run_audit
from paceline.cli.log_options import DeviceName, DtypeName, TotalTokens
from paceline.cli.options import Json
from paceline.cli.output import (
    TableForm,
    TableFormat,
    WhereOption,
    emit_table,
    select_rows,
)
from paceline.cli.terminal import echo
from paceline.core.errors import EXIT_GATE_FAILED
from paceline.core.units import pluralize
from paceline.files.csv_table import TableDefaults
from paceline.report.document import Column

KEYS = ("table", "row", "column", "printed", "recomputed", "difference", "cause")


def audit(
    target: Annotated[
        str | None,
        typer.Argument(
            help="Source, table or row of the references, or a CSV or YAML file; default: all "
            "references.",
            metavar="TABLE|FILE",
        ),
    ] = None,
    all_cells: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also list cells that are consistent only if digits were truncated, or only "
            "when taken alone.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", help="For a CSV file: recipe with the shape of the model."),
    ] = None,
    device: DeviceName = None,
    dtype: DtypeName = None,
    convention: Annotated[
        str | None,
        typer.Option("--convention", help="For a CSV file: FLOPs convention of its figures."),
    ] = None,
    peak: Annotated[
        str | None,
        typer.Option(
            "--peak", help="For a CSV file: peak FLOP/s that its MFU divides by, e.g. 989TFLOP/s."
        ),
    ] = None,
    tokens: TotalTokens = None,
    fail_on_findings: Annotated[
        bool, typer.Option("--fail-on-findings", help="Exit with 3 if a cell is inconsistent.")
    ] = False,
    where: WhereOption = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Recompute published tables, report inconsistent cells and explain them.

    Tokens/s, MFU, TFLOP/s, days and speed-ups are recomputed with the FLOPs convention and the
    peak that the table declares. A cell is consistent if some step time that rounds to the printed
    one gives it. For the other cells a likely cause is searched: the step time of another row, a
    sparse peak, another convention, swapped digits and more.

    Examples:

      paceline table audit                       all tables that come with Paceline

      paceline table audit nvidia-llama31 --all

      paceline table audit mine.csv --model llama31-70b --convention causal

      paceline table audit mine.csv --fail-on-findings --format md
    """
    form = TableFormat.json if as_json else form
    result = run_audit(target, _declared_settings(model, device, dtype, convention, peak, tokens))
    findings = [*result.audit.findings, *(result.audit.minor if all_cells else ())]
    rows = [{key: getattr(finding, key) for key in KEYS} for finding in findings]
    by_row = {id(row): finding for row, finding in zip(rows, findings, strict=True)}
    selected_rows = select_rows(rows, where, KEYS, "tell")
    selected_findings = [by_row[id(row)] for row in selected_rows]
    if form is TableFormat.text:
        _print_text(selected_findings)
    else:
        emit_table(selected_rows, _columns(), form)
    for note in result.notes:
        echo(f"note: {note}", err=True)
    for line in _closing(result.audit):
        echo(line, err=form is not TableFormat.text)
    if fail_on_findings and any(not finding.minor for finding in selected_findings):
        raise typer.Exit(EXIT_GATE_FAILED)


def _declared_settings(
    model: str | None,
    device: str | None,
    dtype: str | None,
    convention: str | None,
    peak: str | None,
    tokens: float | None,
) -> TableDefaults:

    flops_per_s = read_flops_per_s(peak, f"--peak {peak}") if peak else None
    return TableDefaults(model, device, dtype, convention, flops_per_s, tokens)


def _print_text(findings: list[AuditFinding]) -> None:
    """Print one line per finding under the name of its table, with aligned columns."""
    by_table: dict[str, list[list[str]]] = {}
    for f in findings:
        size = "" if f.difference is None else _size(f.difference)
        cells = [f.row, f.column, f.printed, f"not {f.recomputed_text}", size, f.cause]
        by_table.setdefault(f.table, []).append(cells)
    for table, lines in by_table.items():
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        echo(table)
        for line in lines:
            cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            echo(f"  {'  '.join(cells)}".rstrip())
        echo("")


def _size(difference: float) -> str:
    """Return a relative difference with its sign and three digits: `+0.402%`."""
    return f"{100 * difference:+.3g}%"


def _columns() -> list[Column]:
    return [
        *(Column(key, key) for key in KEYS[:4]),
        Column("recomputed", "recomputed", _number, "right"),
        Column("difference", "difference", _size, "right"),
        Column("cause", "cause", wraps=True),
    ]


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _closing(audit: Audit) -> list[str]:
    """Return how many cells were checked, and the reasons for unchecked ones."""
    states, num_minor = audit.states, len(audit.minor)
    failing = states.get("fails", 0)
    only = "only if digits were cut off, or not together with the rest of the row; --all lists them"
    minor = f" ({num_minor} of them {only})" if num_minor else ""
    layouts = len(audit.findings) - failing
    more = f"; {pluralize(layouts, 'layout')} cannot be" if layouts > 0 else ""
    lines = [
        f"{pluralize(audit.num_rows, 'row')}, {pluralize(audit.num_checked, 'cell')} checked: "
        f"{audit.num_following:,} follow{minor}, {failing:,} do not{more}.",
        f"They follow from {pluralize(states.get('speed', 0), 'printed speed')}.",
    ]
    if audit.unchecked_reasons:
        total = sum(audit.unchecked_reasons.values())
        reasons = sorted(audit.unchecked_reasons.items(), key=lambda item: -item[1])
        reasons_text = "; ".join(f"{reason} ({count:,})" for reason, count in reasons)
        lines.append(f"{pluralize(total, 'cell')} could not be checked: {reasons_text}.")
    return lines
