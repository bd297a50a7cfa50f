"""Tables as CSV: full precision, base units, and no cell that a spreadsheet takes for a formula."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from paceline.core.text import printable
from paceline.report.document import Column, Row

_FORMULA_START = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Signs that begin a formula, also in full width."""


def csv_text(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return keys and raw values as CSV, None as an empty field."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([column.key for column in columns])
    writer.writerows([[csv_cell(row.get(column.key)) for column in columns] for row in rows])
    return buffer.getvalue()


def csv_cell(value: object) -> object:
    """Return a CSV cell; text that looks like a formula gets a leading apostrophe."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA_START) else text
