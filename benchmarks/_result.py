"""Context of every result: spread, machine, versions, and other load."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.stats import summarize
from paceline.files.documents import write_text
from paceline.machines.probe.inventory import inventory
from paceline.runs.plan import BUSY_LIMIT

FOLDER = Path(__file__).parent / "results"
Row = dict[str, Any]


class Surroundings:
    """The machine before and after a benchmark; to be made before anything is started."""

    def __init__(self) -> None:
        self.before = inventory()

    def record(self) -> dict[str, Any]:
        """Machine, versions, variables that change the speed, and what else used the cores."""
        busy = [machine["cpu_busy_fraction"] for machine in (self.before, inventory())]
        return {
            "machine": {
                "cpu": self.before["cpu"],
                "memory_bytes": self.before["memory_bytes"],
                "gpus": self.before["gpus"],
            },
            "versions": {"python": self.before["python"], **self.before["packages"]},
            "environment": self.before["environment"],
            "cores_busy_before_and_after": busy,
            "machine_was_idle": max(busy) <= BUSY_LIMIT,
        }


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes, n, and spread: 1.4826 x MAD / median."""
    summary = summarize(np.array(values))
    return {
        "median": summary.median,
        "min": min(values),
        "max": max(values),
        "spread": summary.relative_spread,
        "n": len(values),
    }


def spread_text(spread: dict[str, float], digits: int = 3) -> str:
    """median (min-max) of a `spread_of`."""
    median, low, high = (f"{spread[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} ({low}-{high})"


OF_A_CALL = ("machine", "versions", "environment", "machine_was_idle")


def earlier(name: str, key: str, measured: list[Row], identity: Callable[[Row], Any]) -> list[Row]:
    """Return the rows under `key` in benchmarks/results/NAME.json that this call has not measured.

    Rows with the same `identity` are the same. Each has the machine and versions of its own call.
    """
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    call = {field: content[field] for field in OF_A_CALL}
    keys = {identity(row) for row in measured}
    return [{"earlier_call": call, **row} for row in content[key] if identity(row) not in keys]


def keep(name: str, unit: str, around: Surroundings, **content: Any) -> None:
    """Write benchmarks/results/NAME.json, and say so when the machine was not idle."""
    record = around.record()
    result = {"benchmark": name, "unit": unit, **record, **content}
    write_text(FOLDER / f"{name}.json", json.dumps(result, indent=2) + "\n")
    if not record["machine_was_idle"]:
        shares = " and ".join(f"{share:.0%}" for share in record["cores_busy_before_and_after"])
        print(f"the machine was not idle: {shares} of its cores were in use before and after")
