"""An index of run folders for quick listing; the folders are the truth."""

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
from paceline.core.units import LARGEST_INT
from paceline.files.documents import read_value
from paceline.files.home import cache_folder
from paceline.files.run_folder import RESULT_FILE, RUN_FILE, RunRecord, read_record, run_folders

Evaluate = Callable[[Path], Result]
"""Computes a run's result from its raw files; the caller gives it, because it lies above."""

SCHEMA_VERSION = 4
"""Part of the table's name: a table of another version is left alone and the index built anew."""

_METADATA = MetaData()
RUNS = Table(
    f"runs_v{SCHEMA_VERSION}",
    _METADATA,
    Column("root", String, primary_key=True),
    Column("run", String, primary_key=True),
    Column("created", String),
    Column("recipe", String),
    Column("tag", String),
    Column("group", String),
    Column("status", String),
    Column("device", String),
    Column("devices", Integer),
    Column("layout", String),
    Column("dtype", String),
    Column("tokens_per_s", Float),
    Column("step_time_s", Float),
    Column("mfu", Float),
    Column("of_achievable", Float),
    Column("steps", Integer),
    Column("key", String),
    Column("stamp", String),
)

COLUMNS = tuple(c.name for c in RUNS.columns if c.name not in ("root", "stamp"))
"""What a row says of its run; the others are for the index alone."""

_DAMAGE = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True)
class Listing:
    """All readable runs, oldest first, and what a reader must be told besides."""

    rows: list[dict[str, Any]]
    left_out: list[str]
    """One sentence for each folder that cannot be read."""
    fault: str | None = None
    """Why the index was of no use, so that every folder was read."""


def listing(root: Path, evaluate: Evaluate) -> Listing:
    """All runs under `root`, from the folders alone when the user's cache cannot hold an index.

    Raises SystemFaultError when the database in $PACELINE_DB cannot be used.
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
    def open(cls, root: Path, anew: bool = False) -> Index:
        """The index of `root`: $PACELINE_DB by URL, else SQLite in the user's cache.

        Not beside the runs, because SQLite is unsafe on network file systems. The file in the
        cache is made again when it is damaged or `anew` is asked for.
        """
        if url := os.environ.get("PACELINE_DB"):
            return cls(_connected(url), root)
        file = _sqlite_file(root)
        if anew:
            _remove(file)
        url = URL.create("sqlite", database=str(file))
        try:
            return cls(_connected(url), root)
        except SystemFaultError as fault:
            if not _is_damage(fault.__cause__):
                raise
        _remove(file)
        return cls(_connected(url), root)

    @classmethod
    def in_memory(cls, root: Path) -> Index:
        """An empty index that ends with the process."""
        return cls(_connected("sqlite://", poolclass=StaticPool), root)

    def add(self, folder: Path, result: Result) -> None:
        """Put one run into the index, replacing what it said before."""
        self._write([folder.name], [_row(folder, read_record(folder), result)])

    def rebuild(self, evaluate: Evaluate) -> tuple[int, list[str]]:
        """Read every folder again: (runs, a sentence for each folder that cannot be read)."""
        rows, left_out = _read(run_folders(self.root), evaluate)
        self._write(self._stored(), rows)
        return len(rows), left_out

    def rows(self, evaluate: Evaluate) -> Listing:
        """All runs, oldest first; folders that are new, changed or unfinished are read again."""
        stored = self._stored()
        folders = {folder.name: folder for folder in run_folders(self.root)}
        current = {
            n: stored[n] for n in folders if n in stored and _is_current(stored[n], folders[n])
        }
        read, left_out = _read((f for n, f in folders.items() if n not in current), evaluate)
        self._write(stored.keys() - current.keys(), read)
        rows = sorted([*current.values(), *read], key=lambda row: (row["created"], row["run"]))
        return Listing([{name: row[name] for name in COLUMNS} for row in rows], left_out)

    def _stored(self) -> dict[str, dict[str, Any]]:
        query = select(RUNS).where(RUNS.c.root == str(self.root.resolve()))
        with _faults(), self.engine.connect() as connection:
            return {row.run: dict(row._mapping) for row in connection.execute(query)}

    def _write(self, gone: Iterable[str], rows: list[dict[str, Any]]) -> None:
        """Replace the runs named in `gone`, and those in `rows`, by `rows`."""
        root = str(self.root.resolve())
        names = [{"name": name} for name in {*gone, *(row["run"] for row in rows)}]
        if not names:
            return
        same = (RUNS.c.root == root) & (RUNS.c.run == bindparam("name"))
        with _faults(), self.engine.begin() as connection:
            connection.execute(delete(RUNS).where(same), names)
            if rows:
                connection.execute(insert(RUNS), [{"root": root, **row} for row in rows])


def _read(folders: Iterable[Path], evaluate: Evaluate) -> tuple[list[dict[str, Any]], list[str]]:
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for folder in folders:
        try:
            record = read_record(folder)
            rows.append(_row(folder, record, _result(folder, record, evaluate)))
        except (PacelineError, OSError) as error:
            left_out.append(str(error))
        except Exception as error:  # one folder of somebody else must not hide all others
            left_out.append(f"{folder}: cannot be evaluated: {type(error).__name__}: {error}"[:300])
    return rows, left_out


def _result(folder: Path, record: RunRecord, evaluate: Evaluate) -> Result:
    if record.status in FINAL and (folder / RESULT_FILE).is_file():
        with suppress(PacelineError):  # the raw files still tell what a torn result does not
            return read_value(folder / RESULT_FILE, Result)
    return evaluate(folder)


def _row(folder: Path, record: RunRecord, result: Result) -> dict[str, Any]:
    facts = record.known
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
            for name in ("tokens_per_s", "step_time_s", "mfu", "of_achievable")
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
    """A text that changes when the run's record or result is written again."""
    times: list[int] = []
    for name in (RUN_FILE, RESULT_FILE):
        try:
            times.append((folder / name).stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return " ".join(map(str, times))


def _connected(url: str | URL, **options: Any) -> Engine:
    with _faults():
        engine = create_engine(url, **options)
        _METADATA.create_all(engine)
        with engine.connect() as connection:
            connection.execute(select(RUNS).limit(1)).all()  # a table of another form shows here
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
        return "check PACELINE_DB; without it the index lies in your cache"
    if _is_damage(error) or isinstance(error, IntegrityError):
        return "`paceline db rebuild` makes it anew"
    return "give it a place that can be written with XDG_CACHE_HOME"


def _is_damage(error: BaseException | None) -> bool:
    """True when SQLite says that the file is not its own, torn, or has a table of another form."""
    code: int = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0)
    return code & 0xFF in _DAMAGE


def _sqlite_file(root: Path) -> Path:
    digest = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]
    try:
        cache = cache_folder()
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        raise SystemFaultError("index database", str(error), remedy=_remedy(error)) from error
    return cache / f"index-{digest}.sqlite"


def _remove(file: Path) -> None:
    """Delete the database; a journal left behind would be played into the next one."""
    try:
        for end in ("", "-journal", "-wal", "-shm"):
            file.with_name(file.name + end).unlink(missing_ok=True)
    except OSError as error:
        raise SystemFaultError("index database", str(error), remedy=_remedy(error)) from error
