"""Tables of a report's SQLite file, as numpy columns.

Schema 3 (releases 2022 to 2026): tables are there only if anything was recorded for them, and a
table's columns differ between releases. Times are nanoseconds of one clock.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
FILLS = "CUPTI_ACTIVITY_KIND_MEMSET"
LAUNCHES = "CUPTI_ACTIVITY_KIND_RUNTIME"
MARKS = "NVTX_EVENTS"
SYSTEM_CALLS = "OSRT_API"
STRINGS = "StringIds"
MOST_ROWS = 20_000_000
Column = NDArray[np.int64]


class ReportTables:
    """A report, read only; raises UserError for a file that is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        with self._answers():
            if not self.path.is_file():
                raise UserError(str(self.path), "is no file")
            uri = f"file:{quote(str(self.path.resolve()))}?mode=ro&immutable=1"
            self._db = sqlite3.connect(uri, uri=True)
            self._db.execute("PRAGMA trusted_schema = OFF")
            # A view could compute for ever.
            rows = self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            self.names = {str(name) for (name,) in rows}
        if STRINGS not in self.names:
            raise UserError(
                str(self.path),
                "is no export of Nsight Systems: it has no table StringIds",
                remedy="nsys export --type sqlite REPORT.nsys-rep",
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._db is not None:
            self._db.close()

    def columns(self, table: str) -> set[str]:
        """Names of a table's columns; none where there is no such table."""
        if table not in self.names:
            return set()
        with self._answers():
            return {str(row[1]) for row in self._open.execute(f"PRAGMA table_info({table})")}

    def numbers(self, table: str, names: Sequence[str]) -> tuple[Column, ...]:
        """Columns of whole numbers in the order of `start`; missing values are -1."""
        present = self.columns(table)
        if "start" not in present:
            return tuple(np.empty(0, dtype=np.int64) for _ in names)
        chosen = [f'IFNULL("{name}", -1)' if name in present else "-1" for name in names]
        query = f"SELECT {', '.join(chosen)} FROM {table} ORDER BY start"
        rows: list[NDArray[np.int64]] = []
        total = 0
        with self._answers(), closing(self._open.execute(query)) as cursor:
            while part := cursor.fetchmany(65536):
                total += len(part)
                if total > MOST_ROWS:
                    raise UserError(
                        str(self.path),
                        f"holds more than {MOST_ROWS:,} rows of {table}",
                        remedy="profile fewer steps",
                    )
                rows.append(np.array(part, dtype=np.int64))
        whole = np.concatenate(rows) if rows else np.empty((0, len(names)), dtype=np.int64)
        return tuple(whole.T)

    def texts(self, table: str, column: str, own: str | None = None) -> list[str]:
        """Of each row in the order of `start` the string that a column names, or the `own` text."""
        present = self.columns(table)
        if "start" not in present:
            return []
        named = f"s.value, t.{own}" if own in present else "s.value, NULL"
        joined = f"LEFT JOIN {STRINGS} s ON s.id = t.{column}"
        if column not in present:
            joined = f"LEFT JOIN {STRINGS} s ON 0"
        query = f"SELECT {named} FROM {table} t {joined} ORDER BY t.start"
        with self._answers():
            return [str(value or text or "") for value, text in self._open.execute(query)]

    def strings(self) -> dict[int, str]:
        """Names by their number."""
        with self._answers():
            rows = self._open.execute(f"SELECT id, value FROM {STRINGS}")
            return {int(number): str(value) for number, value in rows}

    def values(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of a query over tables that are there."""
        with self._answers():
            return self._open.execute(query).fetchall()

    @property
    def _open(self) -> sqlite3.Connection:
        assert self._db is not None, "it is entered first"
        return self._db

    @contextmanager
    def _answers(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OverflowError, ValueError, TypeError) as error:
            what = f"cannot be read as a report's SQLite file: {error}"
            raise UserError(
                str(self.path), what, remedy="export it again, by nsys export"
            ) from error
