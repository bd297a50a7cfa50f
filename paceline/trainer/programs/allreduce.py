"""Measure all-reduce among ranks.

Run as python -m paceline.trainer.programs.allreduce '{"device": "cpu", "seconds": 1}', once per
rank. Rank 0 prints a JSON line per payload: {"event": "collective", ranks, bytes, bytes_per_s,
bus_bytes_per_s, latency_s, n, spread, rates}. bytes_per_s is payload / time. bus_bytes_per_s is
bytes_per_s times 2 (n - 1) / n: the traffic of each link, which is comparable between numbers of
ranks.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import distributed as dist

from paceline.trainer.measure.machine import device_name
from paceline.trainer.parallel.mesh import join_world
from paceline.trainer.programs.gemm import relative_spread

PAYLOADS_BYTES = {"cpu": (4096, 2**20, 16 * 2**20), "cuda": (4096, 16 * 2**20, 256 * 2**20)}
MIN_REPEATS, MAX_REPEATS = 5, 200
"""Minimum and maximum repeats of a payload."""


def main(settings: dict[str, Any]) -> None:
    """Measure every payload among all ranks."""
    world = join_world(settings["device"])
    payloads = PAYLOADS_BYTES[world.device.type]
    name = device_name(world.device)
    about = {"device_name": name, "torch": torch.__version__, "backend": world.backend}
    for size in payloads:
        result = measure(
            world.device, world.size, size, settings.get("seconds", 1.0) / len(payloads)
        )
        if world.rank == 0:
            print(json.dumps({"event": "collective", **result, **about}), flush=True)
    if world.backend is not None:
        dist.barrier()
        dist.destroy_process_group()


def measure(
    device: torch.device, ranks: int, size_bytes: int, seconds: float, group: Any = None
) -> dict[str, Any]:
    """Return the rates of one payload; all ranks of the group must pass the same arguments."""
    payload = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    once(payload, group)  # the first connects the ranks, which may take seconds
    one_s = max(once(payload, group) for _ in range(2))
    repeats = torch.tensor(
        [min(MAX_REPEATS, max(MIN_REPEATS, int(seconds / max(one_s, 1e-6))))], device=device
    )
    if ranks > 1:  # all ranks need the same number of repeats
        dist.all_reduce(repeats, op=dist.ReduceOp.MIN, group=group)
    times_s = [once(payload, group) for _ in range(int(repeats.item()))]
    times_s.sort()
    middle_s = times_s[len(times_s) // 2]
    bus = 2.0 * (ranks - 1) / ranks
    return {
        "ranks": ranks,
        "bytes": size_bytes,
        "bytes_per_s": size_bytes / middle_s,
        "bus_bytes_per_s": bus * size_bytes / middle_s,
        "latency_s": middle_s,
        "n": len(times_s),
        "spread": relative_spread(times_s),
    }


def once(payload: torch.Tensor, group: Any) -> float:
    """Return the seconds of one all-reduce, until its result can be read."""
    payload.fill_(1.0)
    settle(payload)
    start = time.perf_counter()
    if dist.is_initialized():
        dist.all_reduce(payload, group=group)
    settle(payload)
    return time.perf_counter() - start


def settle(payload: torch.Tensor) -> None:
    """Wait until the device has completed its work."""
    if payload.device.type == "cuda":
        torch.cuda.synchronize(payload.device)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
