"""Runs cases in pools of ranks, one pool a world size, and keeps what every case came to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.numerics.cases import Case
from tests.numerics.ranks import run_ranks

DRIVER = Path(__file__).with_name("driver.py")
LIMIT_S = 900
WORLDS_AT_ONCE = 2


class Results:
    """What the cases came to."""

    def __init__(self, folder: Path, failures: dict[str, str]) -> None:
        self.folder, self.failures = folder, failures

    def __getitem__(self, case: Case) -> dict[str, Any]:
        """A case's result; an AssertionError with the ranks' tracebacks when it has none."""
        assert case.name not in self.failures, f"{case.name}\n{self.failures[case.name]}"
        return torch.load(self.folder / f"{case.name}.pt")

    def remove(self) -> None:
        """Delete the files; they are a few hundred megabytes."""
        shutil.rmtree(self.folder)

    def seconds(self) -> str:
        """How long every case took, the slowest first."""
        times = [json.loads(path.read_text()) for path in self.folder.glob("*.seconds")]
        rows = sorted(times, key=lambda row: -row["seconds"])
        return "\n".join(f"{row['seconds']:6.2f} s  {row['name']}" for row in rows)


def run_all(cases: Sequence[Case], folder: Path) -> Results:
    """Train all cases; those of one world size follow each other in the same processes.

    Two worlds train at a time: ranks that wait for each other leave a core to the other world.
    """
    worlds: dict[int, list[Case]] = {}
    for case in dict.fromkeys(cases):
        worlds.setdefault(case.ranks, []).append(case)
    failures: dict[str, str] = {}
    with ThreadPoolExecutor(WORLDS_AT_ONCE) as pool:
        largest_first = sorted(worlds.values(), key=lambda world: -world[0].ranks)
        for failed in pool.map(lambda world: _run_world(world, folder), largest_first):
            failures |= failed
    return Results(folder, failures)


def _run_world(cases: list[Case], folder: Path) -> dict[str, str]:
    """Train the cases of one world size; what the failed ones failed of, by name."""
    failures: dict[str, str] = {}
    while cases:
        output = _start(cases[0].ranks, cases, folder)
        unfinished = [case for case in cases if not _result(case, folder).exists()]
        if unfinished:
            # Ranks are out of step after a failure: a new pool goes on behind it.
            failures[unfinished[0].name] = _reason(unfinished[0], folder) or output
        cases = unfinished[1:]
    return failures


def _start(ranks: int, cases: Sequence[Case], folder: Path) -> str:
    """Train cases until the last or the first that fails; the end of what the ranks printed."""
    rows = [
        {"name": case.name, "fault": case.fault, "masked": case.masked, "steps": case.steps,
         "sgd": case.sgd, "compiler": case.compiler, "settings": case.settings()}
        for case in cases
    ]  # fmt: skip
    path = folder / f"cases-{ranks}.json"
    path.write_text(json.dumps(rows))
    _, output = run_ranks(ranks, DRIVER, str(path), str(folder), folder=folder, limit_s=LIMIT_S)
    return output[-4000:]


def _reason(case: Case, folder: Path) -> str:
    """What the ranks wrote about a failure, the first one first: the others lost their partner."""
    files = sorted(folder.glob(f"{case.name}.*.error"), key=lambda path: path.stat().st_mtime_ns)
    return "\n".join(f"{path.name}: {path.read_text()}" for path in files[:1])


def _result(case: Case, folder: Path) -> Path:
    return folder / f"{case.name}.pt"
