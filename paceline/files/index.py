"""An index of run folders for fast listing; the folders remain the source of truth.

Results are computed from the raw files of a folder and kept here. The result.json of a folder is
never believed: a folder of somebody else could state any speed.
"""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Column,
    Engine,
    Float,
    Integer,
    LargeBinary,
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
from paceline.core.result import FINAL, Result, finite_value
from paceline.core.text import as_text, is_text
from paceline.core.units import LARGEST_INT
from paceline.files.documents import read_value
from paceline.files.home import cache_folder
from paceline.files.run_folder import (
    LOGS_FOLDER,
    RESULT_FILE,
    RUN_FILE,
    STEPS_FOLDER,
    RunRecord,
    read_record,
    run_folders,
)

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
_INTERNAL = (("stamp", String), ("contradiction", String), ("result", LargeBinary))
_METADATA = MetaData()
# The table's name depends on its columns, so that a table of another version is never read.
_COLUMNS_DIGEST = hashlib.sha256(
    repr([(name, kind.__name__) for name, kind in (*_COLUMN_TYPES.items(), *_INTERNAL)]).encode()
).hexdigest()[:8]
RUNS = Table(
    f"runs_{_COLUMNS_DIGEST}",
    _METADATA,
    Column("root", String, primary_key=True),
    Column("run", String, primary_key=True),
    *(Column(name, kind) for name, kind in _COLUMN_TYPES.items()),
    *(Column(name, kind) for name, kind in _INTERNAL),
)

_SMALL_COLUMNS = tuple(column for column in RUNS.c if column.name != "result")
COLUMNS = ("run", *_COLUMN_TYPES)
"""Columns about the run; the others are internal."""

MAX_STAMPED_FILES = 64
"""Maximum number of files in a folder whose times decide whether a run is read again."""
_DAMAGE = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True)
class Listing:
    """All readable runs, oldest first, with warnings."""

    rows: list[dict[str, Any]]
    left_out: list[str]
    """One sentence for each folder that cannot be read."""
    fault: str | None = None
    """Reason why the index could not be used and every folder was read."""
    contradictions: tuple[str, ...] = ()
    """One sentence for each run whose result.json states something else than its raw files."""


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
        return replace(rebuilt, fault=str(fault))


class KnownResults:
    """Results of runs by the index of their folder, or computed from the raw files."""

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate
        self._rows: dict[Path, dict[str, dict[str, Any]]] = {}

    def __call__(self, folder: Path) -> Result:
        """Return the result of a run."""
        root = folder.parent
        if root not in self._rows:
            self._rows[root] = {}
            with suppress(SystemFaultError):
                self._rows[root] = Index.open(root).stored_rows(RUNS.c)
        row = self._rows[root].get(folder.name)
        if row is None or not _is_current(row, folder):
            return self._evaluate(folder)
        return Result.model_validate_json(zlib.decompress(row["result"]))


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
        self._write(self.stored_rows(), rows)
        return len(rows), left_out

    def rows(self, evaluate: Evaluate) -> Listing:
        """Return all runs, oldest first; read folders that are new, changed or unfinished."""
        stored_rows = self.stored_rows()
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
        contradictions = tuple(
            f"{row['run']}: result.json states {row['contradiction']}, but its raw files do not"
            for row in rows
            if row["contradiction"]
        )
        listed_rows = [{name: row[name] for name in COLUMNS} for row in rows]
        return Listing(listed_rows, left_out, contradictions=contradictions)

    def stored_rows(
        self, columns: Iterable[Column[Any]] = _SMALL_COLUMNS
    ) -> dict[str, dict[str, Any]]:
        """Return the rows of all runs by the names of their folders."""
        query = select(*columns).where(RUNS.c.root == str(self.root.resolve()))
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
            rows.append(_row(folder, record, evaluate(folder)))
        except (PacelineError, OSError) as error:
            left_out.append(str(error))
        except Exception as error:  # one broken folder must not hide the others
            left_out.append(f"{folder}: cannot be evaluated: {type(error).__name__}: {error}"[:300])
    return rows, left_out


def _contradiction(folder: Path, row: dict[str, Any]) -> str | None:
    """Return the figures of result.json that differ from those in the row; None if all agree."""
    try:
        result = read_value(folder / RESULT_FILE, Result)
    except PacelineError:
        return None
    figures = {"status": result.status, "steps": result.steps_done, **_figures(result)}
    different = {name: value for name, value in figures.items() if not _same(value, row[name])}
    texts = (
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in different.items()
    )
    return ", ".join(texts) or None


def _same(ours: str | float | None, theirs: str | float | None) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return ours == theirs


def _figures(result: Result) -> dict[str, float | None]:
    names = ("tokens_per_s", "step_time_s", "mfu", "achievable_fraction")
    return {name: finite_value(result.metrics.get(name)) for name in names}


def _row(folder: Path, record: RunRecord, result: Result) -> dict[str, Any]:
    facts = record.settings
    if (facts.num_devices or 0) > LARGEST_INT:
        raise UserError(str(folder), f"{facts.num_devices} devices are more than can be indexed")
    layout = facts.layout.label(facts.num_devices) if facts.layout and facts.num_devices else None
    row = {
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
        **_figures(result),
        "steps": result.steps_done,
        "key": record.key,
        "stamp": _stamp(folder),
        "result": zlib.compress(result.model_dump_json().encode()),
    }
    return {**row, "contradiction": _contradiction(folder, row)}


def _is_current(row: dict[str, Any], folder: Path) -> bool:
    return row["status"] in FINAL and row["stamp"] == _stamp(folder)


def _stamp(folder: Path) -> str:
    """Return a text that changes when a file is written from which the run's result follows.

    Of many files of ranks and logs, the first are looked at: `paceline runs index` reads all.
    """
    names = [folder / RUN_FILE, folder / RESULT_FILE]
    for inner in (folder / STEPS_FOLDER, folder / LOGS_FOLDER):
        with suppress(OSError):
            names += [inner, *islice(sorted(inner.iterdir()), MAX_STAMPED_FILES)]
    stats: list[os.stat_result] = []
    for name in names:
        with suppress(OSError):
            stats.append(name.stat())
    newest = max((each.st_ctime_ns for each in stats), default=0)
    return f"{newest} {len(stats)} {sum(each.st_size for each in stats)}"


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
