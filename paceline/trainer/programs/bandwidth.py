"""Measure the memory copy bandwidth.

Run as python -m paceline.trainer.programs.bandwidth '{"device": "cpu", "seconds": 1}'.

Prints a JSON line per size: {"event": "memory", bytes, bytes_per_s, n, spread, rates, ...}. A copy
counts twice, once as read and once as written.
"""

from __future__ import annotations

import json
import sys
from statistics import median
from typing import Any

import torch

from paceline.trainer.measure.clock import Clock, clock_of
from paceline.trainer.programs.gemm import device_facts, elapsed, relative_spread

SIZES_BYTES = {"cpu": (64 * 2**20, 512 * 2**20), "cuda": (256 * 2**20, 2**30)}
"""Sizes of the copies; the last one is far larger than any cache."""
BLOCKS = 10
"""Number of blocks of copies; a rate is the median of the blocks."""


def main(settings: dict[str, Any]) -> None:
    """Measure every size and print its line."""
    device = torch.device(settings["device"])
    about, sizes = device_facts(device), SIZES_BYTES[device.type]
    for size in sizes:
        result = measure_copy(device, size, settings.get("seconds", 1.0) / len(sizes))
        print(json.dumps({"event": "memory", **result, **about}), flush=True)


def measure_copy(device: torch.device, size_bytes: int, seconds: float) -> dict[str, Any]:
    """Return the rate of one size in bytes/s, read and written together."""
    source = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    rates = sustained_rates(
        lambda: target.copy_(source), 2.0 * size_bytes, clock_of(device), seconds
    )
    return {"bytes": size_bytes, "bytes_per_s": median(rates), **rate_statistics(rates)}


def sustained_rates(work: Any, amount: float, clock: Clock, seconds: float) -> list[float]:
    """Return the rate of `amount` of work in each of BLOCKS blocks, about `seconds` long in total.

    Blocks are longer than the time scales of schedulers and power limits, so that a throttled
    device cannot look fast between pauses.
    """
    elapsed(work, clock, 1)
    one_s = max(elapsed(work, clock, 1), 1e-6)
    times = max(1, round(seconds / BLOCKS / one_s))
    return [amount * times / elapsed(work, clock, times) for _ in range(BLOCKS)]


def rate_statistics(rates: list[float]) -> dict[str, Any]:
    """Return the number of blocks, their spread and their rates."""
    return {"n": len(rates), "spread": relative_spread(rates), "rates": rates}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
