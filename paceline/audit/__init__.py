"""Published tables recomputed from their own speeds: what does not follow, by how much, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.audit.convention import assume
from paceline.audit.findings import Audit, AuditFinding, audit_rows, together
from paceline.audit.samples import samples_notes
from paceline.core.errors import UserError, did_you_mean
from paceline.files import references
from paceline.files.csv_table import Declared, read_csv
from paceline.files.recipe import recipe_names
from paceline.files.references import Row

__all__ = ["Audit", "AuditFinding", "Declared", "audit", "audit_rows", "together"]


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
