"""Measure everything that a calibration needs apart from steps.

Run as python -m paceline.trainer.programs.calibration SETTINGS, once per rank.

SETTINGS is a JSON object {device, dtype, products, attention, payloads, threads, seconds,
matmul_precision}. All ranks measure the same at the same time, so that they share cores, memory and
links like the ranks of a training run. Rank 0 prints the JSON lines of kernels and latency, of
copies {"event": "memory"}, of collectives by payload, and of the exposed fraction of a collective
during GEMMs {"event": "overlap", "exposed"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import distributed as dist

from paceline.trainer.measure.clock import clock_of
from paceline.trainer.measure.machine import die_with_parent
from paceline.trainer.parallel.mesh import World, join_world
from paceline.trainer.programs.allreduce import PAYLOADS_BYTES, measure, settle
from paceline.trainer.programs.bandwidth import SIZES_BYTES, measure_copy
from paceline.trainer.programs.gemm import DTYPES, device_facts, measure_shape, relative_spread
from paceline.trainer.programs.kernels import passes
from paceline.trainer.programs.latency import launch_latency

OVERLAPS = 9
OVERLAP_BYTES = {"cpu": 8 * 2**20, "cuda": 128 * 2**20}
LARGE = {"cpu": (1024, 1024, 1024), "cuda": (8192, 8192, 8192)}
"""GEMM shape for the device's rate."""


def main(settings: dict[str, Any]) -> None:
    """Measure in all ranks and print on rank 0."""
    if settings.get("threads"):
        torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision(settings.get("matmul_precision", "high"))
    world = join_world(settings["device"])
    about = {**device_facts(world.device), "ranks": world.size}
    for line in lines(settings, world):
        if world.rank == 0:
            print(json.dumps({**line, **about}), flush=True)
    if world.size > 1:
        dist.barrier()


def lines(settings: dict[str, Any], world: World) -> Iterator[dict[str, Any]]:
    """Yield this rank's measurements, in about `seconds`; ranks start each part together."""
    device, share_s = world.device, settings.get("seconds", 8.0) / 4
    _barrier(world)
    large = LARGE[device.type]
    result = measure_shape(settings["dtype"], large, device, clock_of(device), share_s / 2)
    yield {"shape": list(large), "dtype": settings["dtype"], **result}
    _barrier(world)
    yield {"event": "memory", **measure_copy(device, SIZES_BYTES[device.type][0], share_s / 2)}
    _barrier(world)
    yield launch_latency(device, share_s / 8)
    _barrier(world)
    yield from passes({**settings, "seconds": 2 * share_s}, device)
    if world.size == 1:
        return
    payloads = settings.get("payloads") or PAYLOADS_BYTES[device.type]
    for size in payloads:
        _barrier(world)
        result = measure(device, world.size, size, share_s / 2 / len(payloads))
        yield {"event": "collective", **result}
    _barrier(world)
    yield overlap(world, settings["dtype"])


def overlap(world: World, dtype: str) -> dict[str, Any]:
    """Return the fraction of an all-reduce that is exposed when it runs during GEMMs."""
    payload = torch.ones(OVERLAP_BYTES[world.device.type] // 4, device=world.device)
    m, n, k = LARGE[world.device.type]
    a, b = (torch.randn(size, device=world.device).to(DTYPES[dtype]) for size in ((m, k), (k, n)))

    def compute() -> None:
        torch.mm(a, b)

    exchange_s = _median_of(lambda: dist.all_reduce(payload), payload)
    compute_s = _median_of(compute, payload)
    times = max(1, round(exchange_s / compute_s))

    def gemms() -> None:
        for _ in range(times):
            compute()

    def both() -> None:
        work = dist.all_reduce(payload, async_op=True)
        gemms()
        assert work is not None
        work.wait()

    alone_s = _median_of(gemms, payload)
    shares = [(_once(both, payload) - alone_s) / exchange_s for _ in range(OVERLAPS)]
    exposed = min(1.0, max(0.0, median(shares)))
    return {
        "event": "overlap",
        "exposed": exposed,
        "bytes": payload.numel() * 4,
        "n": OVERLAPS,
        "spread": relative_spread([1 + share for share in shares]),
    }


def _median_of(work: Callable[[], object], on: torch.Tensor) -> float:
    return median([_once(work, on) for _ in range(OVERLAPS)])


def _once(work: Callable[[], object], on: torch.Tensor) -> float:
    on.fill_(1.0)  # sums of sums would overflow
    dist.barrier()
    settle(on)
    start = time.perf_counter()
    work()
    settle(on)
    return time.perf_counter() - start


def _barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier()


if __name__ == "__main__":
    if "RANK" in os.environ:
        die_with_parent(os.getppid())
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
