"""Runs cases in pools of ranks, one pool a world size, and keeps what every case came to."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.numerics.cases import Case
from tests.trainer.example import command

DRIVER = Path(__file__).with_name("driver.py")
LIMIT_S = 480


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
    """Train all cases; those of one world size follow each other in the same processes."""
    failures: dict[str, str] = {}
    for ranks in sorted({case.ranks for case in cases}):
        remaining = [case for case in dict.fromkeys(cases) if case.ranks == ranks]
        while remaining:
            output = _start(ranks, remaining, folder)
            unfinished = [case for case in remaining if not _result(case, folder).exists()]
            if unfinished:
                # Ranks are out of step after a failure: a new pool goes on behind it.
                failures[unfinished[0].name] = _reason(unfinished[0], folder) or output
            remaining = unfinished[1:]
    return Results(folder, failures)


def _start(ranks: int, cases: Sequence[Case], folder: Path) -> str:
    """Train cases until the last or the first that fails; what the processes printed at the end."""
    rows = [
        {"name": case.name, "fault": case.fault, "masked": case.masked, "steps": case.steps,
         "sgd": case.sgd, "settings": case.settings()}
        for case in cases
    ]  # fmt: skip
    path = folder / f"cases-{ranks}.json"
    path.write_text(json.dumps(rows))
    done = subprocess.run(
        command(ranks, str(DRIVER), str(path), str(folder)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    return done.stdout[-4000:]


def _reason(case: Case, folder: Path) -> str:
    """What the ranks wrote about a failure, the first one first: the others lost their partner."""
    files = sorted(folder.glob(f"{case.name}.*.error"), key=lambda path: path.stat().st_mtime_ns)
    return "\n".join(f"{path.name}: {path.read_text()}" for path in files[:1])


def _result(case: Case, folder: Path) -> Path:
    return folder / f"{case.name}.pt"
