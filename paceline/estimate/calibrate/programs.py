"""Probes and short trainings on so many ranks of this machine, by the trainer's own programs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import Dtype
from paceline.core.stats import summarize
from paceline.engines import native
from paceline.estimate.calibrate.calibration import About, Placement
from paceline.estimate.calibrate.cases import ShortTraining, attention, products
from paceline.files.recipe import Recipe
from paceline.machines.probe.program import probe_lines

RATES_S = 10.0
"""What the probes of one number of ranks take, beside their start."""
STEPS, DROPPED = 8, 2
"""Steps of a short training, and its first ones that do not count: they touch memory for the first
time and choose kernels."""
LIMIT_S = 600.0
PAYLOADS = {"cpu": (4096, 2**16, 2**20, 2**23), "cuda": (4096, 2**20, 2**24, 2**28)}
"""Bytes of the all-reduces; only large ones fill the links between GPUs."""


@dataclass(frozen=True)
class Rates:
    """The probes of one placement, as their programs printed them."""

    lines: Sequence[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        """The lines of one kind."""
        return [line for line in self.lines if line["event"] == event]

    @property
    def placement(self) -> Placement:
        """Rates of each rank; raises SystemFaultError when a large product failed."""
        if not self.of("gemm"):
            reason = (self.of("skipped") or [{"reason": "nothing"}])[0]["reason"]
            raise SystemFaultError("gemm probe", str(reason))
        large = self.of("collective")
        return Placement(
            ranks=self.lines[0]["ranks"],
            threads=self.lines[0]["threads"],
            flops_per_s=self.of("gemm")[0]["flops_per_s"],
            memory_bytes_per_s=self.of("memory")[0]["bytes_per_s"],
            link_bytes_per_s=max((line["bus_bytes_per_s"] for line in large), default=None),
        )


@dataclass(frozen=True)
class TimedTraining:
    """A short training and what its steps took."""

    short: ShortTraining
    seconds: float
    n: int
    spread: float


@dataclass(frozen=True)
class Measurements:
    """All that was measured of one machine."""

    about: About
    rates: Sequence[Rates]
    timed: Sequence[TimedTraining]


def rates(
    python: str, kind: str, dtype: Dtype, ranks: int, threads: int | None, recipes: Sequence[Recipe]
) -> Rates:
    """All probes in `ranks` processes at once; raises SystemFaultError when they fail."""
    question = {
        "device": kind,
        "dtype": dtype,
        "threads": threads,
        "seconds": RATES_S,
        "payloads": PAYLOADS[kind],
        "products": products(recipes),
        "attention": attention(recipes),
    }
    return Rates(
        probe_lines(
            python, "programs.calibration", question, ranks=ranks, threads=threads, limit_s=LIMIT_S
        )
    )


def steps(
    python: str, shorts: Sequence[ShortTraining], ranks: int, threads: int | None
) -> list[TimedTraining]:
    """The step times of short trainings, all of so many ranks, one after the other."""
    cases = [
        {"name": short.name, "settings": native.settings(short.spec), "steps": STEPS}
        for short in shorts
    ]
    if not cases:
        return []
    with tempfile.TemporaryDirectory(prefix="paceline-calibrate-") as folder:
        path = Path(folder) / "cases.json"
        path.write_text(json.dumps({"cases": cases}), encoding="utf-8")
        lines = probe_lines(
            python,
            "programs.step_times",
            {"file": str(path)},
            ranks=ranks,
            threads=threads,
            limit_s=LIMIT_S,
        )
    times = {line["name"]: line["times_s"] for line in lines}
    return [_timed(short, times[short.name]) for short in shorts]


def _timed(short: ShortTraining, times_s: Sequence[float]) -> TimedTraining:
    import numpy as np

    summary = summarize(np.array(times_s[DROPPED:]))
    return TimedTraining(short, summary.median, STEPS - DROPPED, summary.relative_spread or 0.0)
