"""An index of run folders for fast listing; the folders remain the source of truth."""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Column,
    Engine,
    Float,
    Integer,
    MetaData,
    StaticPool,
    String,
    Table,
    bindparam,
    create_engine,
    delete,
    insert,
    select,
)
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.core.result import FINAL, Metric, Result
from paceline.core.text import as_text, is_text
from paceline.core.units import LARGEST_INT
from paceline.files.documents import read_value
from paceline.files.home import cache_folder
from paceline.files.run_folder import RESULT_FILE, RUN_FILE, RunRecord, read_record, run_folders

Evaluate = Callable[[Path], Result]
"""Function that computes a run's result from its raw files; passed in to avoid an import cycle."""

_COLUMN_TYPES = {
    "created": String,
    "recipe": String,
    "tag": String,
    "group": String,
    "status": String,
    "device": String,
    "devices": Integer,
    "layout": String,
    "dtype": String,
    "tokens_per_s": Float,
    "step_time_s": Float,
    "mfu": Float,
    "achievable_fraction": Float,
    "steps": Integer,
    "key": String,
}
_METADATA = MetaData()
# The table's name depends on its columns, so that a table of another version is never read.
_COLUMNS_DIGEST = hashlib.sha256(
    repr([(name, kind.__name__) for name, kind in _COLUMN_TYPES.items()]).encode()
).hexdigest()[:8]
RUNS = Table(
    f"runs_{_COLUMNS_DIGEST}",
    _METADATA,
    Column("root", String, primary_key=True),
    Column("run", String, primary_key=True),
    *(Column(name, kind) for name, kind in _COLUMN_TYPES.items()),
    Column("stamp", String),
)

COLUMNS = ("run", *_COLUMN_TYPES)
"""Columns about the run; the others are internal."""

_DAMAGE = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True)
class Listing:
    """All readable runs, oldest first, with warnings."""

    rows: list[dict[str, Any]]
    left_out: list[str]
    """One sentence for each folder that cannot be read."""
    fault: str | None = None
    """Reason why the index could not be used and every folder was read."""


def listing(root: Path, evaluate: Evaluate) -> Listing:
    """List all runs under `root`, directly from the folders if the user's cache has no usable
    index.

    Raises SystemFaultError if the database in $PACELINE_DB cannot be used.
    """
    try:
        return Index.open(root).rows(evaluate)
    except SystemFaultError as fault:
        if os.environ.get("PACELINE_DB"):
            raise
        rebuilt = Index.in_memory(root).rows(evaluate)
        return Listing(rebuilt.rows, rebuilt.left_out, str(fault))


@dataclass(frozen=True)
class Index:
    """The index of all runs under one root."""

    engine: Engine
    root: Path

    @classmethod
    def open(cls, root: Path, rebuild: bool = False) -> Index:
        """Open the index of `root`: $PACELINE_DB by URL, else SQLite in the user's cache.

        It is not stored with the runs, because SQLite is unsafe on network file systems. The file
        in the cache is created again if it is damaged or if `rebuild` is set.
        """
        if url := os.environ.get("PACELINE_DB"):
            return cls(_connect(url), root)
        file = _sqlite_file(root)
        if rebuild:
            _remove(file)
        url = URL.create("sqlite", database=str(file))
        try:
            return cls(_connect(url), root)
        except SystemFaultError as fault:
            if not _is_damage(fault.__cause__):
                raise
        _remove(file)
        return cls(_connect(url), root)

    @classmethod
    def in_memory(cls, root: Path) -> Index:
        """Return an empty index in memory."""
        return cls(_connect("sqlite://", poolclass=StaticPool), root)

    def add(self, folder: Path, result: Result) -> None:
        """Add one run to the index, or replace its row."""
        self._write([folder.name], [_row(folder, read_record(folder), result)])

    def forget(self, names: Iterable[str]) -> None:
        """Delete the rows of runs by the names of their folders."""
        self._write(names, [])

    def rebuild(self, evaluate: Evaluate) -> tuple[int, list[str]]:
        """Read every folder again and return (number of runs, one message per unreadable
        folder)."""
        rows, left_out = _read(run_folders(self.root), evaluate)
        left_out += _folders_without_text_name(self.root)
        self._write(self._stored_rows(), rows)
        return len(rows), left_out

    def rows(self, evaluate: Evaluate) -> Listing:
        """Return all runs, oldest first; read folders that are new, changed or unfinished."""
        stored_rows = self._stored_rows()
        folders = {folder.name: folder for folder in run_folders(self.root)}
        current = {
            n: stored_rows[n]
            for n in folders
            if n in stored_rows and _is_current(stored_rows[n], folders[n])
        }
        read, left_out = _read((f for n, f in folders.items() if n not in current), evaluate)
        left_out += _folders_without_text_name(self.root)
        self._write(stored_rows.keys() - current.keys(), read)
        rows = sorted([*current.values(), *read], key=lambda row: (row["created"], row["run"]))
        return Listing([{name: row[name] for name in COLUMNS} for row in rows], left_out)

    def _stored_rows(self) -> dict[str, dict[str, Any]]:
        query = select(RUNS).where(RUNS.c.root == str(self.root.resolve()))
        with _faults(), self.engine.connect() as connection:
            return {row.run: dict(row._mapping) for row in connection.execute(query)}

    def _write(self, names_to_delete: Iterable[str], rows: list[dict[str, Any]]) -> None:
        """Delete the runs `names_to_delete` and those in `rows`, then insert `rows`."""
        root = str(self.root.resolve())
        names = [{"name": name} for name in {*names_to_delete, *(row["run"] for row in rows)}]
        if not names:
            return
        same = (RUNS.c.root == root) & (RUNS.c.run == bindparam("name"))
        with _faults(), self.engine.begin() as connection:
            connection.execute(delete(RUNS).where(same), names)
            if rows:
                connection.execute(insert(RUNS), [{"root": root, **row} for row in rows])


def _folders_without_text_name(root: Path) -> list[str]:
    """Return one message for each run folder whose name is not text."""
    with suppress(OSError):
        names = [entry.name for entry in os.scandir(root) if not is_text(entry.name)]
        what = "has a name that is not UTF-8 text; rename it"
        return [f"{root}/{as_text(n)}: {what}" for n in names if (root / n / RUN_FILE).is_file()]
    return []


def _read(folders: Iterable[Path], evaluate: Evaluate) -> tuple[list[dict[str, Any]], list[str]]:
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for folder in folders:
        try:
            record = read_record(folder)
            rows.append(_row(folder, record, _result(folder, record, evaluate)))
        except (PacelineError, OSError) as error:
            left_out.append(str(error))
        except Exception as error:  # one broken folder must not hide the others
            left_out.append(f"{folder}: cannot be evaluated: {type(error).__name__}: {error}"[:300])
    return rows, left_out


def _result(folder: Path, record: RunRecord, evaluate: Evaluate) -> Result:
    if record.status in FINAL and (folder / RESULT_FILE).is_file():
        with suppress(PacelineError):  # a damaged result is computed again from the raw files
            return read_value(folder / RESULT_FILE, Result)
    return evaluate(folder)


def _row(folder: Path, record: RunRecord, result: Result) -> dict[str, Any]:
    facts = record.settings
    if (facts.num_devices or 0) > LARGEST_INT:
        raise UserError(str(folder), f"{facts.num_devices} devices are more than can be indexed")
    layout = facts.layout.label(facts.num_devices) if facts.layout and facts.num_devices else None
    return {
        "run": folder.name,
        "created": record.created,
        "recipe": facts.recipe,
        "tag": record.tag,
        "group": record.group,
        "status": result.status,
        "device": facts.device,
        "devices": facts.num_devices,
        "layout": layout,
        "dtype": facts.dtype,
        **{
            name: _value(result.metrics.get(name))
            for name in ("tokens_per_s", "step_time_s", "mfu", "achievable_fraction")
        },
        "steps": result.steps_done,
        "key": record.key,
        "stamp": _stamp(folder),
    }


def _value(metric: Metric | None) -> float | None:
    value = metric.value if metric else None
    return value if value is not None and math.isfinite(value) else None


def _is_current(row: dict[str, Any], folder: Path) -> bool:
    return row["status"] in FINAL and row["stamp"] == _stamp(folder)


def _stamp(folder: Path) -> str:
    """Return a text that changes when the run's record or result is written again."""
    times: list[int] = []
    for name in (RUN_FILE, RESULT_FILE):
        try:
            times.append((folder / name).stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return " ".join(map(str, times))


def _connect(url: str | URL, **options: Any) -> Engine:
    with _faults():
        engine = create_engine(url, **options)
        _METADATA.create_all(engine)
        with engine.connect() as connection:
            connection.execute(select(RUNS).limit(1)).all()  # fails if the table's columns differ
        return engine


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, ImportError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise SystemFaultError("index database", lines[0], remedy=_remedy(error)) from error


def _remedy(error: Exception) -> str:
    if os.environ.get("PACELINE_DB"):
        return "check PACELINE_DB; without it the index is in your cache"
    if _is_damage(error) or isinstance(error, IntegrityError):
        return "`paceline runs index` creates it again"
    return "set XDG_CACHE_HOME to a writable folder"


def _is_damage(error: BaseException | None) -> bool:
    """Return True if SQLite reports a damaged file, another file type, or different columns."""
    code: int = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0)
    return code & 0xFF in _DAMAGE


def _sqlite_file(root: Path) -> Path:
    digest = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]
    try:
        cache = cache_folder()
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        raise SystemFaultError("index database", str(error), remedy=_remedy(error)) from error
    return cache / f"index-{digest}.sqlite"


def _remove(file: Path) -> None:
    """Delete the database and its journal, which SQLite would replay into the next one."""
    try:
        for end in ("", "-journal", "-wal", "-shm"):
            file.with_name(file.name + end).unlink(missing_ok=True)
    except OSError as error:
        raise SystemFaultError("index database", str(error), remedy=_remedy(error)) from error
