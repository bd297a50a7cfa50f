"""Measure the launch latency of one small operation.

Run as python -m paceline.trainer.programs.latency '{"device": "cpu", "seconds": 1}'.

Prints one JSON line: {"event": "latency", "seconds", "n", "spread", ...}. It is the median time per
operation in a series of additions, each too small for its work to matter. A model's block has
dozens of such operations.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any

import torch

from paceline.trainer.measure.clock import clock_of
from paceline.trainer.programs.gemm import device_facts, elapsed, relative_spread

CALLS_PER_REPEAT = 200
MIN_REPEATS, MAX_REPEATS = 10, 100
"""Minimum and maximum repeats of a series."""
ELEMENTS = 16


def main(settings: dict[str, Any]) -> None:
    """Measure and print."""
    device = torch.device(settings["device"])
    latency = launch_latency(device, settings.get("seconds", 1.0))
    print(json.dumps({**latency, **device_facts(device)}), flush=True)


def launch_latency(device: torch.device, seconds: float) -> dict[str, Any]:
    """Return the seconds from one small operation to the next."""
    numbers, clock = torch.ones(ELEMENTS, device=device), clock_of(device)
    elapsed(lambda: numbers.add_(1.0), clock, CALLS_PER_REPEAT)
    times_s: list[float] = []
    end = time.perf_counter() + seconds
    while len(times_s) < MIN_REPEATS or (len(times_s) < MAX_REPEATS and time.perf_counter() < end):
        times_s.append(
            elapsed(lambda: numbers.add_(1.0), clock, CALLS_PER_REPEAT) / CALLS_PER_REPEAT
        )
    return {
        "event": "latency",
        "seconds": median(times_s),
        "n": len(times_s),
        "spread": relative_spread(times_s),
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
