"""Recompute published tables from their own speeds: which cells do not follow, and why."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from paceline.audit.crosscheck import CellVerdict, check
from paceline.audit.derivation import Cell
from paceline.audit.rows import assume, audit_lines
from paceline.core.errors import UserError, unknown_name
from paceline.core.layout import MODEL_AXES
from paceline.core.printed import like
from paceline.core.units import pluralize
from paceline.files import references
from paceline.files.csv_table import TableDefaults, read_csv
from paceline.files.recipe import load_recipe, recipe_names
from paceline.files.references import Row

NO_FIGURE = "no figure is printed"


@dataclass(frozen=True)
class AuditFinding:
    """A cell that does not follow from its own row."""

    table: str
    row: str
    column: str
    printed: str
    """Text in the source."""
    recomputed: float | str | None
    """In base units; percentages as fractions."""
    difference: float | None
    """Printed over recomputed, minus 1."""
    cause: str
    recomputed_text: str
    """Recomputed value with the unit and digits of the printed one."""
    minor: bool = False
    """True if it follows from truncated digits, or only without the row's other cells."""


@dataclass(frozen=True)
class Audit:
    """Findings, and the number of cells by state."""

    findings: tuple[AuditFinding, ...] = ()
    minor: tuple[AuditFinding, ...] = ()
    num_rows: int = 0
    states: Mapping[str, int] = field(default_factory=dict[str, int])
    """States: follows, cut, strained, fails, speed (others follow from it), unchecked."""
    unchecked_reasons: Mapping[str, int] = field(default_factory=dict[str, int])
    """Cells that could not be checked, by reason."""

    @property
    def num_checked(self) -> int:
        """Number of cells compared with others, without the speeds the others follow from."""
        return sum(self.states.get(state, 0) for state in ("follows", "cut", "strained", "fails"))

    @property
    def num_following(self) -> int:
        """Number of checked cells that follow, including truncated ones."""
        return self.num_checked - self.states.get("fails", 0)


def audit_rows(rows: Sequence[Row], only: Iterable[str] | None = None) -> Audit:
    """Audit the rows of one source, or only the rows with the IDs in `only`.

    All rows of the source are needed: one may repeat another, or be the base of its speed-ups.
    """
    ids = {row.id for row in rows} if only is None else set(only)
    audited_rows = [row for row in rows if row.id in ids]
    order = {row.id: at for at, row in enumerate(rows)}
    verdicts = [v for v in check(audit_lines(rows)) if v.line.name in ids]
    listed_findings = [
        (_finding(v), v.state) for v in verdicts if v.state in ("fails", "cut", "strained")
    ]
    lists = list(_rank_lists(audited_rows))
    findings = [f for f, state in listed_findings if state == "fails"]
    findings += [*_layouts(audited_rows), *(finding for finding in lists if finding)]
    blank = sum(len(row.printed) for row in audited_rows) - len(verdicts) - len(lists)
    unchecked_reasons = Counter(v.cause or "" for v in verdicts if v.state == "unchecked")
    states = Counter[str](v.state for v in verdicts)
    states.update("fails" if finding else "follows" for finding in lists)
    states["unchecked"] += blank
    return Audit(
        tuple(sorted(findings, key=lambda f: order[f.row])),
        tuple(f for f, state in listed_findings if state != "fails"),
        len(audited_rows),
        states,
        unchecked_reasons + Counter({NO_FIGURE: blank}),
    )


def merge_audits(audits: Iterable[Audit]) -> Audit:
    """Merge several audits into one."""
    parts = list(audits)
    return Audit(
        tuple(f for part in parts for f in part.findings),
        tuple(f for part in parts for f in part.minor),
        sum(part.num_rows for part in parts),
        sum((Counter(part.states) for part in parts), Counter[str]()),
        sum((Counter(part.unchecked_reasons) for part in parts), Counter[str]()),
    )


def _finding(verdict: CellVerdict) -> AuditFinding:
    cell, value, difference = verdict.cell, verdict.recomputed, verdict.difference
    if value is None or difference is None or not (isfinite(value) and isfinite(difference)):
        value = difference = None
    recomputed_text = "-" if value is None else _like_the_cell(value / cell.unit, cell)
    return AuditFinding(
        table=verdict.line.table,
        row=verdict.line.name,
        column=cell.column,
        printed=cell.printed.text,
        recomputed=value,
        difference=difference,
        cause=verdict.cause or "",
        recomputed_text=recomputed_text,
        minor=verdict.state != "fails",
    )


def _like_the_cell(value: float, cell: Cell) -> str:
    """Format a value with the cell's digits and unit, or more digits if those hide a difference."""
    digits = like(value, cell.printed)
    if cell.printed.bound or digits == cell.printed.digits:
        digits = f"{value:.{len(digits.partition('.')[2]) + 2}f}"
    unit = "%" if cell.printed.text.rstrip().endswith("%") else ""
    return digits + unit


def _layouts(rows: Sequence[Row]) -> Iterator[AuditFinding]:
    """Yield layouts that do not divide the number of devices, once per table."""
    rows_by_layout: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        axes = [axis for axis in MODEL_AXES if axis in row.layout.model_fields_set]
        if axes and row.num_devices and row.num_devices % row.layout.model_devices:
            layout_text = " ".join(f"{axis} {getattr(row.layout, axis)}" for axis in axes)
            rows_by_layout.setdefault((row.table, layout_text), []).append(row)
    for (table, layout_text), members in rows_by_layout.items():
        row, devices = members[0], members[0].layout.model_devices
        counts = sorted({row.num_devices or 0 for row in members})
        cause = f"a replica of {pluralize(devices, 'device')} does not fit {_device_counts(counts)}"
        if row.shape and row.layout.pp > row.shape.num_layers:
            layers = pluralize(row.shape.num_layers, "layer", "have")
            cause += f", and {layers} no {pluralize(row.layout.pp, 'stage')}"
        replicas = counts[0] / devices
        replicas_text = f"{replicas:.3g} replicas"
        yield AuditFinding(
            table=table,
            row=row.id,
            column="layout",
            printed=layout_text,
            recomputed=replicas,
            difference=None,
            cause=cause,
            recomputed_text=replicas_text,
        )


def _device_counts(counts: Sequence[int]) -> str:
    words = [f"{count:,}" for count in counts[:-1]]
    return " or ".join(filter(None, (", ".join(words), pluralize(counts[-1], "device"))))


def _rank_lists(rows: Sequence[Row]) -> Iterator[AuditFinding | None]:
    """Yield a finding for every printed list of ranks, or None if the list is complete."""
    for row in rows:
        text = row.printed.get("ranks")
        ranks = read_ranks(text) if text else None
        if text is None or ranks is None:
            continue
        gaps = missing_ranks(ranks)
        if not gaps:
            yield None
            continue
        full_range = f"{min(ranks)}-{max(ranks)}"
        words = ", ".join(map(str, gaps))
        nodes = _nodes(row, max(ranks) - min(ranks) + 1)
        cause = f"rank {words} is missing from {full_range}{nodes}"
        difference = len(ranks) / (len(ranks) + len(gaps)) - 1
        yield AuditFinding(
            table=row.table,
            row=row.id,
            column="ranks",
            printed=text,
            recomputed=full_range,
            difference=difference,
            cause=cause,
            recomputed_text=full_range,
        )


def _nodes(row: Row, num_ranks: int) -> str:
    """Return a note if the range of ranks is a number of whole nodes."""
    per_node = row.devices_per_node
    if per_node is None or num_ranks % per_node:
        return ""
    return f", the ranks of {pluralize(num_ranks // per_node, 'whole node')}"


def read_ranks(text: str) -> list[int] | None:
    """Parse ranks such as `0,1,4-7` in the given order; return None for any other text."""
    parts = [part.strip() for part in text.split(",")]
    spans = [re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part) for part in parts]
    ranks: list[int] = []
    for span in spans:
        if span is None or int(span[2] or 0) - int(span[1]) > 1_000_000:
            return None
        ranks += range(int(span[1]), int(span[2] or span[1]) + 1)
    return ranks


def missing_ranks(ranks: list[int]) -> list[int]:
    """Return the ranks between the first and the last that are not in the list."""
    return sorted(set(range(min(ranks), max(ranks) + 1)) - set(ranks)) if ranks else []


SAMPLES_PER_S = {"samples_per_s", "samples_per_s_unrounded"}


def samples_notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield notes on what samples/s count, and in which tables samples are padded."""
    printing = [row for row in rows if SAMPLES_PER_S & row.printed.keys()]
    if not printing:
        return
    yield (
        "samples/s count all samples of a step, including padding; tokens/s derived from them "
        "count every position"
    )
    padded = [row for row in printing if row.recipe and _pads(row.recipe)]
    tables = list(dict.fromkeys(row.table for row in padded))
    if tables:
        yield (
            f"samples of {', '.join(tables)} are padded to seq_len; the fraction of text is not "
            "printed, so tokens/s of text cannot be derived"
        )


def _pads(recipe: str) -> bool:
    return load_recipe(recipe).data.packing == "padded"


@dataclass(frozen=True)
class AuditReport:
    """An audit, with notes on how the table was read."""

    audit: Audit
    notes: tuple[str, ...] = ()


def audit(target: str | None = None, options: TableDefaults | None = None) -> AuditReport:
    """Audit a source, table or row that comes with Paceline, a file, or all tables.

    Raises UserError for an unknown name, with the nearest one, or for a faulty file, with its line.
    """
    path = Path(target or "")
    # Path.is_file raises for names that are not valid file names.
    if path.suffix.lower() in (".csv", ".yaml", ".yml") or os.path.isfile(path):  # noqa: PTH113
        return _audit_file(path, options or TableDefaults())
    if options and options != TableDefaults():
        where = target or "the tables that come with Paceline"
        raise UserError(where, "declares these values itself; the options apply only to CSV files")
    if target is None:
        audits = merge_audits(audit_rows(s.rows) for s in references.sources().values())
        return AuditReport(audits, tuple(samples_notes(references.rows())))
    source, rows = references.find_source_and_rows(target)
    return AuditReport(
        audit_rows(source.rows, [row.id for row in rows]), tuple(samples_notes(rows))
    )


def _audit_file(path: Path, options: TableDefaults) -> AuditReport:
    if path.suffix.lower() in (".yaml", ".yml"):
        rows = references.read_source(path).rows
        return AuditReport(audit_rows(rows), tuple(samples_notes(rows)))
    if options.model is not None and options.model.lower() not in (names := recipe_names()):
        raise unknown_name(
            f"recipe {options.model!r}",
            "is unknown",
            options.model,
            names,
            listing="paceline recipes",
        )
    table = read_csv(path, options)
    rows, assumptions = assume(table.rows, table.gated_is_open)
    notes = (
        [f"ignored columns: {', '.join(table.ignored_columns)}"] if table.ignored_columns else []
    )
    parts = (audit_rows(group) for group in _by_source(rows))
    notes += [*map(str, assumptions), *samples_notes(rows)]
    return AuditReport(merge_audits(parts), tuple(notes))


def _by_source(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.source, []).append(row)
    return list(groups.values())
