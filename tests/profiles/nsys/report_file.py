"""SQLite files in the schema of Nsight Systems' export, with numbers of our own making."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

THREAD = (281903970123776 // (1 << 24)) * (1 << 24) + 25570
"""A global thread: the number of its process, and its own."""
PROCESS = THREAD - THREAD % (1 << 24)
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL,
  deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL,
  correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL,
  deviceId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
  copyKind INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL,
  eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL,
  returnValue INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL,
  text TEXT, globalTid INTEGER, textId INTEGER, domainId INTEGER);
"""
MS = 1_000_000


@dataclass
class ReportFile:
    """A report of one process; times are milliseconds."""

    path: Path
    strings: dict[str, int] = field(default_factory=dict[str, int])
    calls: int = 0

    def __post_init__(self) -> None:
        self.db = sqlite3.connect(self.path)
        self.db.executescript(SCHEMA)

    def text(self, value: str) -> int:
        """Its number."""
        return self.strings.setdefault(value, len(self.strings) + 1)

    def kernel(
        self, name: str, begin: float, end: float, launched: float, process: int = PROCESS
    ) -> None:
        """A kernel, and the call that launched it."""
        number = self._launch(launched, process)
        times = round(begin * MS), round(end * MS)
        row = (*times, 0, 1, 7, number, process, self.text(name), self.text(name[:4]))
        self.db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?,?)", row)

    def copy(self, kind: int, begin: float, end: float, launched: float) -> None:
        """A copy to or from the device."""
        number = self._launch(launched, PROCESS)
        row = (round(begin * MS), round(end * MS), 0, number, PROCESS, 4096, kind)
        self.db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?,?,?)", row)

    def mark(self, text: str, begin: float, end: float, registered: bool = True) -> None:
        """A range of NVTX, its text in the table of strings or its own."""
        named = (None, self.text(text)) if registered else (text, None)
        row = (round(begin * MS), round(end * MS), 59, named[0], THREAD, named[1], 0)
        self.db.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?,?)", row)

    def done(self) -> Path:
        """The file."""
        self.db.executemany(
            "INSERT INTO StringIds (value, id) VALUES (?,?)", list(self.strings.items())
        )
        self.db.commit()
        self.db.close()
        return self.path

    def _launch(self, moment: float, process: int) -> int:
        self.calls += 1
        begin = round(moment * MS)
        row = (begin, begin + 5000, 0, process + 11, self.calls, self.text("cudaLaunchKernel"), 0)
        self.db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?,?,?)", row)
        return self.calls
