"""Finished runs of one recipe at chosen speeds and times, as run folders with raw step files."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.run import RunSpec
from paceline.files.documents import write_text, write_value
from paceline.files.run_folder import INVENTORY_FILE, RESULT_FILE, RUN_FILE
from paceline.runs.outcome import evaluate
from tests.example import make_spec
from tests.files.rank_files import write_ranks
from tests.files.test_run_folder import make_record

FIRST_DAY = datetime(2026, 10, 1, 3, tzinfo=UTC)
MACHINE: dict[str, Any] = {
    "schema": 2,
    "host": "node-1",
    "kernel": "6.8.0-40",
    "gpus": [],
    "cpu": {"model": "Epyc 9654", "mitigations": {}},
    "memory_bytes": 25e9,
    "load_average_1min": 0.1,
    "packages": {"numpy": "2.4.0"},
    "environment": {},
}
NUM_STEPS = 13


def make_finished(
    root: Path,
    number: int,
    step_time_s: float,
    *,
    machine: dict[str, Any] | None = None,
    torch: str = "2.13.0",
    day: float | None = None,
    spec: RunSpec | None = None,
    status: str = "ok",
    **fields: Any,
) -> Path:
    """A run folder of the recipe `example` whose median steady step is exactly `step_time_s`."""
    moment = FIRST_DAY + timedelta(days=number if day is None else day)
    folder = root / f"{moment:%Y-%m-%d}-example-{number}"
    created = moment.isoformat(timespec="milliseconds")
    spec = spec or make_spec(ranks=1)
    record = make_record(status, name=folder.name, created=created, spec=spec, **fields)  # type: ignore[arg-type]
    write_value(folder / RUN_FILE, record)
    scatter = np.random.default_rng(number).permutation(np.linspace(-0.002, 0.002, NUM_STEPS))
    times = step_time_s * (1 + scatter)
    steps = [{"step_time_s": t, "busy_time_s": t, "comm_wait_s": 0.0} for t in map(float, times)]
    write_ranks(folder, spec, steps, ended=status == "ok", torch=torch)
    write_text(folder / INVENTORY_FILE, json.dumps({**MACHINE, **(machine or {})}))
    if status == "ok":
        write_value(folder / RESULT_FILE, evaluate(folder).result)
    return folder


def make_many(root: Path, step_times_s: list[float], **fields: Any) -> list[Path]:
    """One run a day with these step times."""
    return [make_finished(root, at, time, **fields) for at, time in enumerate(step_times_s)]


def around(centre: float, n: int, seed: int = 0, spread: float = 0.004) -> list[float]:
    """n values around `centre` with a relative standard deviation of `spread`."""
    return list(centre * np.exp(np.random.default_rng(seed).normal(0, spread, n)))
