"""Published tables recomputed from their own speeds: what does not follow, by how much, and why."""

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
from paceline.audit.rows import assume, lines_of
from paceline.core.errors import UserError, did_you_mean
from paceline.core.layout import MODEL_AXES
from paceline.core.printed import like
from paceline.core.units import counted
from paceline.files import references
from paceline.files.csv_table import Declared, read_csv
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
    """As in the source."""
    recomputed: float | str | None
    """In base units, per cent as a fraction."""
    difference: float | None
    """Printed over recomputed, minus 1."""
    cause: str
    shown: str
    """The recomputed value with the unit and digits of the printed one."""
    minor: bool = False
    """True when it does follow: from cut digits, or only without the row's other cells."""


@dataclass(frozen=True)
class Audit:
    """Findings, and the number of cells by what became of them."""

    findings: tuple[AuditFinding, ...] = ()
    minor: tuple[AuditFinding, ...] = ()
    num_rows: int = 0
    states: Mapping[str, int] = field(default_factory=dict[str, int])
    """`follows cut strained fails speed unchecked`; speeds are what the others follow from."""
    unchecked: Mapping[str, int] = field(default_factory=dict[str, int])
    """Cells that could not be checked, by reason."""

    @property
    def num_checked(self) -> int:
        """Cells that were held against others, without the speeds that the others follow from."""
        return sum(self.states.get(state, 0) for state in ("follows", "cut", "strained", "fails"))

    @property
    def num_following(self) -> int:
        """Checked cells that follow, cut ones included."""
        return self.num_checked - self.states.get("fails", 0)


def audit_rows(rows: Sequence[Row], only: Iterable[str] | None = None) -> Audit:
    """The audit of the rows of one source; of the rows called `only`, beside all the others.

    Rows of a source are related: one may repeat another, or give the base of its speed-ups.
    """
    ids = {row.id for row in rows} if only is None else set(only)
    kept = [row for row in rows if row.id in ids]
    order = {row.id: at for at, row in enumerate(rows)}
    verdicts = [v for v in check(lines_of(rows)) if v.line.name in ids]
    listed = [(_finding(v), v.state) for v in verdicts if v.state in ("fails", "cut", "strained")]
    lists = list(_rank_lists(kept))
    findings = [f for f, state in listed if state == "fails"]
    findings += [*_layouts(kept), *(finding for finding in lists if finding)]
    blank = sum(len(row.printed) for row in kept) - len(verdicts) - len(lists)
    unchecked = Counter(v.cause or "" for v in verdicts if v.state == "unchecked")
    states = Counter[str](v.state for v in verdicts)
    states.update("fails" if finding else "follows" for finding in lists)
    states["unchecked"] += blank
    return Audit(
        tuple(sorted(findings, key=lambda f: order[f.row])),
        tuple(f for f, state in listed if state != "fails"),
        len(kept),
        states,
        unchecked + Counter({NO_FIGURE: blank}),
    )


def together(audits: Iterable[Audit]) -> Audit:
    """Several audits as one."""
    parts = list(audits)
    return Audit(
        tuple(f for part in parts for f in part.findings),
        tuple(f for part in parts for f in part.minor),
        sum(part.num_rows for part in parts),
        sum((Counter(part.states) for part in parts), Counter[str]()),
        sum((Counter(part.unchecked) for part in parts), Counter[str]()),
    )


def _finding(verdict: CellVerdict) -> AuditFinding:
    cell, value, difference = verdict.cell, verdict.recomputed, verdict.difference
    if value is None or difference is None or not (isfinite(value) and isfinite(difference)):
        value = difference = None
    shown = "-" if value is None else _like_the_cell(value / cell.unit, cell)
    return AuditFinding(
        verdict.line.table,
        verdict.line.name,
        cell.column,
        cell.printed.text,
        value,
        difference,
        verdict.cause or "",
        shown,
        verdict.state != "fails",
    )


def _like_the_cell(value: float, cell: Cell) -> str:
    """The value with the cell's digits and unit; more digits where those hide the difference."""
    digits = like(value, cell.printed)
    if cell.printed.bound or digits == cell.printed.digits:
        digits = f"{value:.{len(digits.partition('.')[2]) + 2}f}"
    unit = "%" if cell.printed.text.rstrip().endswith("%") else ""
    return digits + unit


def _layouts(rows: Sequence[Row]) -> Iterator[AuditFinding]:
    """Parallel axes that a table states and that cannot hold its devices, once a table."""
    seen: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        axes = [axis for axis in MODEL_AXES if axis in row.layout.model_fields_set]
        if axes and row.num_devices and row.num_devices % row.layout.model_devices:
            printed = " ".join(f"{axis} {getattr(row.layout, axis)}" for axis in axes)
            seen.setdefault((row.table, printed), []).append(row)
    for (table, printed), members in seen.items():
        row, devices = members[0], members[0].layout.model_devices
        counts = sorted({row.num_devices or 0 for row in members})
        cause = f"a replica of {counted(devices, 'device')} does not fit {_either(counts)}"
        if row.shape and row.layout.pp > row.shape.num_layers:
            layers = counted(row.shape.num_layers, "layer", "have")
            cause += f", and {layers} no {counted(row.layout.pp, 'stage')}"
        replicas = counts[0] / devices
        shown = f"{replicas:.3g} replicas"
        yield AuditFinding(table, row.id, "layout", printed, replicas, None, cause, shown)


def _either(counts: Sequence[int]) -> str:
    words = [f"{count:,}" for count in counts[:-1]]
    return " or ".join(filter(None, (", ".join(words), counted(counts[-1], "device"))))


def _rank_lists(rows: Sequence[Row]) -> Iterator[AuditFinding | None]:
    """For every printed list of ranks: a finding, or None when it leaves none out."""
    for row in rows:
        text = row.printed.get("ranks")
        ranks = read_ranks(text) if text else None
        if text is None or ranks is None:
            continue
        gaps = left_out(ranks)
        if not gaps:
            yield None
            continue
        whole = f"{min(ranks)}-{max(ranks)}"
        words = ", ".join(map(str, gaps))
        nodes = _nodes(row, max(ranks) - min(ranks) + 1)
        cause = f"rank {words} is left out of {whole}{nodes}"
        difference = len(ranks) / (len(ranks) + len(gaps)) - 1
        yield AuditFinding(row.table, row.id, "ranks", text, whole, difference, cause, whole)


def _nodes(row: Row, num_ranks: int) -> str:
    """Words for a span of ranks that is a number of whole nodes."""
    per_node = row.devices_per_node
    if per_node is None or num_ranks % per_node:
        return ""
    return f", the ranks of {counted(num_ranks // per_node, 'whole node')}"


def read_ranks(text: str) -> list[int] | None:
    """The ranks of `0,1,4-7`, in the order written; None for anything else."""
    parts = [part.strip() for part in text.split(",")]
    spans = [re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part) for part in parts]
    ranks: list[int] = []
    for span in spans:
        if span is None or int(span[2] or 0) - int(span[1]) > 1_000_000:
            return None
        ranks += range(int(span[1]), int(span[2] or span[1]) + 1)
    return ranks


def left_out(ranks: list[int]) -> list[int]:
    """Ranks between the first and the last that are not in the list."""
    return sorted(set(range(min(ranks), max(ranks) + 1)) - set(ranks)) if ranks else []


SAMPLES_PER_S = {"samples_per_s", "samples_per_s_unrounded"}


def samples_notes(rows: Sequence[Row]) -> Iterator[str]:
    """What samples/s count in the rows that print them, and in which tables they are padded."""
    printing = [row for row in rows if SAMPLES_PER_S & row.printed.keys()]
    if not printing:
        return
    yield (
        "samples/s are read as all samples of a step over its time, padding included; tokens/s "
        "that follow from them count every position"
    )
    padded = [row for row in printing if row.recipe and _pads(row.recipe)]
    tables = list(dict.fromkeys(row.table for row in padded))
    if tables:
        yield (
            f"the samples of {', '.join(tables)} are records filled up to seq_len: how much of "
            "them is text is not printed, so their samples/s give no tokens/s of text"
        )


def _pads(recipe: str) -> bool:
    return load_recipe(recipe).data.packing == "padded"


@dataclass(frozen=True)
class Audited:
    """An audit, and what a reader of it should know about how the table was read."""

    audit: Audit
    notes: tuple[str, ...] = ()


def audit(target: str | None = None, declared: Declared | None = None) -> Audited:
    """The audit of a source, table or row that comes with Paceline, of a file, or of all tables.

    Raises UserError for an unknown name, with the nearest, and for a faulty file, with its line.
    """
    path = Path(target or "")
    # Path.is_file raises for names that no file can have.
    if path.suffix.lower() in (".csv", ".yaml", ".yml") or os.path.isfile(path):  # noqa: PTH113
        return _of_file(path, declared or Declared())
    if declared and declared != Declared():
        where = target or "the tables that come with Paceline"
        raise UserError(where, "declares itself what options would declare; they are for CSV files")
    if target is None:
        audits = together(audit_rows(s.rows) for s in references.sources().values())
        return Audited(audits, tuple(samples_notes(references.rows())))
    source, rows = references.located(target)
    return Audited(audit_rows(source.rows, [row.id for row in rows]), tuple(samples_notes(rows)))


def _of_file(path: Path, declared: Declared) -> Audited:
    if path.suffix.lower() in (".yaml", ".yml"):
        rows = references.read_source(path).rows
        return Audited(audit_rows(rows), tuple(samples_notes(rows)))
    if declared.model is not None and declared.model.lower() not in (names := recipe_names()):
        hint = did_you_mean(declared.model, names) or "`paceline recipes` lists them"
        raise UserError(
            f"recipe {declared.model!r}", "is unknown", allowed=", ".join(names), remedy=hint
        )
    table = read_csv(path, declared)
    rows, assumptions = assume(table.rows, table.gated_is_open)
    notes = (
        [f"columns that are not understood: {', '.join(table.ignored)}"] if table.ignored else []
    )
    parts = (audit_rows(group) for group in _by_source(rows))
    notes += [*map(str, assumptions), *samples_notes(rows)]
    return Audited(together(parts), tuple(notes))


def _by_source(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.source, []).append(row)
    return list(groups.values())
