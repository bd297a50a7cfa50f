"""Settings from a log's path: `results/<version>/<dtype>/<size>/<GPUs>/` of NVIDIA's recipes.

Source: the results path of NVIDIA's dgxc-benchmarking, llama3.1/README_70b.md of v25.01. That
version also stores traced runs separately (`<version>-nccl-trace`) and puts profiles into `nsys/`
next to the logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.core.shape import Shape, num_parameters
from paceline.core.units import count

SAME_SIZE = 0.15
"""Relative tolerance of a size in a path, which is a name: 8b means 8.03 billion parameters, 1b
means 1.24 billion."""
SCALES = {"b": 1e9, "m": 1e6}
MAX_REPORTS = 10_000

_RESULTS = re.compile(
    r"/(?P<dtype>bf16|fp16|fp32|fp8)/(?P<size>\d{1,4}(?:\.\d{1,2})?)(?P<unit>[bm])"
    r"/(?P<devices>[1-9]\d{0,5})(?=/)",
    re.IGNORECASE,
)
_TRACED = re.compile(r"/([^/]*-nccl-trace|nsys_profile|torch_profile)(?=/)", re.IGNORECASE)
_REPORT_OF_JOB = re.compile(r"_\d+g_(\d+)_")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class PathFacts:
    """Settings by the names of RunSettings, and the reason why the run counts as profiled."""

    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    size: str | None = None
    """Model size as written in the path."""
    why_profiled: str | None = None

    def notes(self, from_log: Mapping[str, Any], from_user: Mapping[str, Any]) -> Iterator[str]:
        """Yield notes on a profile, and on contradictions to the log and to the user."""
        if self.why_profiled:
            yield self.why_profiled
        for name, value in self.values.items():
            words = name.replace("_", " ")
            if name in from_user and from_user[name] != value:
                yield f"{words} {from_user[name]} was given, but the path says {value}"
            elif name in from_log and from_log[name] != value:
                yield (
                    f"the path says {words} {value}; the log reports {from_log[name]}, which is "
                    "used"
                )

    def another_model(self, model: Shape | None) -> Iterator[str]:
        """Yield a warning if the given model differs in size from the path's."""
        if model is None or "nominal_parameters" not in self.values:
            return
        num_given = num_parameters(model)
        if abs(self.values["nominal_parameters"] / num_given - 1) > SAME_SIZE:
            parameters = f"{count(num_given)} parameters"
            yield f"the path says {self.size}, but the given model has {parameters}"


NO_PATH = PathFacts()
"""Empty settings, for a log whose path is unknown or states nothing."""


def path_facts(path: Path) -> PathFacts:
    """Return the settings that the folders above `path` state; the innermost matches are used."""
    place = path.absolute().as_posix()
    matches = list(_RESULTS.finditer(place))
    why = _why_profiled(path, place)
    values: dict[str, Any] = {"profiled": True} if why else {}
    if not matches:
        return PathFacts(values, why_profiled=why)
    match = matches[-1]
    values |= {
        "dtype": match["dtype"].lower(),
        "num_devices": int(match["devices"]),
        "nominal_parameters": float(match["size"]) * SCALES[match["unit"].lower()],
    }
    return PathFacts(values, match["size"] + match["unit"], why)


def _why_profiled(path: Path, place: str) -> str | None:
    if match := _TRACED.search(place):
        return f"profiled: the folder {match[1]} is for traced runs"
    if report := _report_of(path):
        return f"profiled: nsys/{report} belongs to this job"
    return None


def _report_of(path: Path) -> str | None:
    """Return a profile next to the log whose job number is in the log's name."""
    numbers = set(_NUMBER.findall(path.name))
    try:
        names = [p.name for p in islice((path.parent / "nsys").glob("*.nsys-rep"), MAX_REPORTS)]
    except OSError:
        return None
    jobs = ((name, _REPORT_OF_JOB.search(name)) for name in sorted(names))
    return next((name for name, job in jobs if job and job[1] in numbers), None)
