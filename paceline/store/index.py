"""An index of run folders for quick listing; the folders are the truth."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Column,
    Engine,
    Float,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    delete,
    insert,
    select,
)
from sqlalchemy.exc import SQLAlchemyError

from paceline.core.result import FINAL, Metric, Result
from paceline.errors import SystemFaultError, UserError
from paceline.rundir import RESULT_FILE, current_status, read_record, read_value, run_folders

SCHEMA = 1
"""Part of the database's name: a new form starts a new database, rebuilt from the folders."""

_METADATA = MetaData()
RUNS = Table(
    "runs",
    _METADATA,
    Column("root", String, primary_key=True),
    Column("run", String, primary_key=True),
    Column("created", String),
    Column("recipe", String),
    Column("tag", String),
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
)


@dataclass(frozen=True)
class Index:
    """The index of all runs under one root."""

    engine: Engine
    root: str

    @classmethod
    def open(cls, root: Path) -> Index:
        """The index of `root`: $PACELINE_DB by URL, else SQLite in the user's cache.

        Not beside the runs, because SQLite is unsafe on network file systems.
        """
        try:
            url = os.environ.get("PACELINE_DB") or f"sqlite:///{_sqlite_file(root)}"
            engine = create_engine(url)
            _METADATA.create_all(engine)
        except (SQLAlchemyError, ImportError, OSError) as error:
            raise SystemFaultError(
                "index database", _first_line(error), remedy="check PACELINE_DB"
            ) from error
        return cls(engine, str(root.resolve()))

    def add(self, folder: Path, result: Result | None = None) -> None:
        """Put one run into the index, replacing what it said before."""
        row = {"root": self.root, **_row(folder, result)}
        same = (RUNS.c.root == self.root) & (RUNS.c.run == row["run"])
        try:
            with self.engine.begin() as connection:
                connection.execute(delete(RUNS).where(same))
                connection.execute(insert(RUNS).values(row))
        except SQLAlchemyError as error:
            raise SystemFaultError("index database", _first_line(error)) from error

    def rebuild(self, root: Path) -> tuple[int, list[str]]:
        """Empty the index and read every folder again: (runs, folders that cannot be read)."""
        with self.engine.begin() as connection:
            connection.execute(delete(RUNS).where(RUNS.c.root == self.root))
        unreadable: list[str] = []
        count = 0
        for folder in run_folders(root):
            try:
                self.add(folder)
                count += 1
            except (UserError, SystemFaultError) as error:
                unreadable.append(str(error))
        return count, unreadable

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """All runs, oldest first; folders that are new, gone or unfinished are read again."""
        known = {row["run"]: row for row in self._stored()}
        folders = {folder.name: folder for folder in run_folders(root)}
        for name in known.keys() - folders.keys():
            with self.engine.begin() as connection:
                connection.execute(
                    delete(RUNS).where((RUNS.c.root == self.root) & (RUNS.c.run == name))
                )
        for name, folder in folders.items():
            if name not in known or known[name]["status"] not in FINAL:
                try:
                    self.add(folder)
                except (UserError, SystemFaultError):
                    continue
        return self._stored()

    def _stored(self) -> list[dict[str, Any]]:
        query = select(RUNS).where(RUNS.c.root == self.root).order_by(RUNS.c.created, RUNS.c.run)
        with self.engine.connect() as connection:
            return [dict(row._mapping) for row in connection.execute(query)]


def _row(folder: Path, result: Result | None) -> dict[str, Any]:
    record = read_record(folder)
    if result is None and (folder / RESULT_FILE).is_file():
        result = read_value(folder / RESULT_FILE, Result)
    spec = record.spec
    metrics = result.metrics if result else {}
    return {
        "run": folder.name,
        "created": record.created,
        "recipe": spec.recipe,
        "tag": record.tag,
        "status": result.status if result else current_status(record),
        "device": spec.cluster.device,
        "devices": spec.world_size,
        "layout": spec.layout.label(spec.world_size),
        "dtype": spec.training.dtype,
        **{name: _value(metrics.get(name)) for name in
           ("tokens_per_s", "step_time_s", "mfu", "of_achievable")},
        "steps": result.steps_done if result else None,
        "key": spec.key,
    }  # fmt: skip


def _value(metric: Metric | None) -> float | None:
    return metric.value if metric else None


def _sqlite_file(root: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    cache.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]
    return cache / f"index-v{SCHEMA}-{digest}.sqlite"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
