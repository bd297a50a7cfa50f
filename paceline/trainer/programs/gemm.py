"""Measure the GEMM throughput of this machine.

Run as python -m paceline.trainer.programs.gemm '{"device": "cpu", ...}'.

The argument is a JSON object {device, dtypes, matmul_precision, threads, seconds}. Prints a JSON
line per shape and dtype: {"event": "gemm", dtype, shape [m, n, k], flops_per_s, statistic, n,
spread, cpu_share, ...}, or {"event": "skipped", dtype, shape, reason}. A dtype takes about
`seconds`, plus a few GEMMs of each shape.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.trainer.measure.clock import Clock, clock_of
from paceline.trainer.measure.machine import device_name

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
SHAPES = {
    "cpu": (
        (512,) * 3,
        (1024, 1024, 512),
        (1024,) * 3,
        (4096, 1024, 1024),
        (2048,) * 3,
        (2048, 4096, 1024),
        (4096,) * 3,
    ),
    "cuda": ((2048,) * 3, (4096,) * 3, (8192,) * 3, (8192, 28672, 4096), (16384,) * 3),
}
MIN_SHAPES = 3
"""Number of shapes, the smallest ones, that are always measured.

A first shape that other programs slow down must not decide about the rest. A later one is skipped
if its minimum repeats do not fit into the remaining time at the best rate so far.
"""
MIN_REPEATS, MAX_REPEATS = 5, 50
"""Minimum and maximum repeats of a shape."""
WARMUP = 1
STATISTIC = "best of n"
"""Statistic of the repeats: other programs only slow a repeat down, so the fastest one counts.

A repeat is long enough to make the clock's resolution irrelevant.
"""
REPEAT_S = 2e-3
"""Minimum time of a repeat; shorter GEMMs are timed in groups, so that launches do not count."""
FP8_CAPABILITY = (8, 9)
"""First CUDA compute capability with fp8 matrix units."""


def main(settings: dict[str, Any]) -> None:
    """Measure all dtypes and print a line for every shape."""
    device = torch.device(settings["device"])
    if settings.get("threads"):
        torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision(settings.get("matmul_precision", "high"))
    clock, about = clock_of(device), device_facts(device)
    for dtype in settings["dtypes"]:
        for line in measure_dtype(dtype, device, clock, settings.get("seconds", 1.0)):
            print(json.dumps({**line, **about}), flush=True)


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return the fields of every line that describe the device and PyTorch."""
    return {
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def measure_dtype(
    dtype: str, device: torch.device, clock: Clock, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield a line per shape, in about `seconds` in total."""
    reason = unsupported_reason(dtype, device)
    if reason is not None:
        yield {"event": "skipped", "dtype": dtype, "shape": None, "reason": reason}
        return
    deadline = time.perf_counter() + seconds
    rate = 0.0
    shapes = SHAPES[device.type]
    for index, shape in enumerate(shapes):
        left_s = max(0.0, deadline - time.perf_counter())
        line: dict[str, Any] = {"dtype": dtype, "shape": list(shape)}
        needed_s = (WARMUP + 1 + MIN_REPEATS) * flops(shape) / rate if rate else 0.0
        if index >= MIN_SHAPES and needed_s > left_s:
            reason = f"needs about {needed_s:.2g} s, but only {left_s:.2g} s are left"
            yield {"event": "skipped", **line, "reason": reason}
            continue
        result = measure_shape(dtype, shape, device, clock, left_s / (len(shapes) - index))
        rate = max(rate, result.get("flops_per_s", 0.0))
        yield {**line, **result}


def measure_shape(
    dtype: str, shape: tuple[int, ...], device: torch.device, clock: Clock, share_s: float
) -> dict[str, Any]:
    """Return the rate of one shape from the repeats that fit into `share_s`, at least FEWEST."""
    times_s: list[float] = []
    try:
        multiply = make_gemm(dtype, shape, device)
        elapsed(multiply, clock, WARMUP)  # first calls select kernels and touch memory
        inner = max(1, round(REPEAT_S / elapsed(multiply, clock, 1)))
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        while len(times_s) < MIN_REPEATS or (
            len(times_s) < MAX_REPEATS and time.perf_counter() - start_s < share_s
        ):
            times_s.append(elapsed(multiply, clock, inner) / inner)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    except RuntimeError as error:  # out of memory, or a GEMM that this build lacks
        return {"event": "skipped", "reason": " ".join(str(error).split())[:200]}
    return {
        "event": "gemm",
        "flops_per_s": flops(shape) / min(times_s),
        "statistic": STATISTIC,
        "n": len(times_s),
        "spread": relative_spread(times_s),
        "cpu_share": cpu_s / (wall_s * torch.get_num_threads()) if device.type == "cpu" else None,
    }


def relative_spread(values: list[float]) -> float:
    """Return the relative spread, 1.4826 x MAD / median."""
    median = statistics.median(values)
    return 1.4826 * statistics.median(abs(v - median) for v in values) / median


def flops(shape: tuple[int, ...]) -> float:
    """Return the FLOPs of one GEMM: 2 m n k."""
    m, n, k = shape
    return 2.0 * m * n * k


def unsupported_reason(dtype: str, device: torch.device) -> str | None:
    """Return why this dtype is not measured on this device, or None."""
    if dtype not in DTYPES:
        return f"only {', '.join(DTYPES)} are measured"
    if device.type == "cuda":
        if dtype == "fp8" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            return "this GPU has no fp8 matrix units"
        return None
    if dtype in ("fp16", "fp8"):
        return f"PyTorch emulates {dtype} GEMMs on a CPU, up to a thousand times slower than bf16"
    return None


def make_gemm(dtype: str, shape: tuple[int, ...], device: torch.device) -> Callable[[], object]:
    """Return a GEMM of random (m, k) and the transpose of random (n, k), as in a linear layer.

    The values are random because a GPU draws less power on zeros and clocks higher.
    """
    m, n, k = shape
    a = torch.randn(m, k, device=device, dtype=torch.float32).to(DTYPES[dtype])
    b = torch.randn(n, k, device=device, dtype=torch.float32).to(DTYPES[dtype]).t()
    if dtype != "fp8":
        out = torch.empty(m, n, device=device, dtype=a.dtype)
        return lambda: torch.mm(a, b, out=out)
    scale = torch.ones((), device=device)
    return lambda: torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def elapsed(multiply: Callable[[], object], clock: Clock, times: int) -> float:
    """Return the seconds that `times` consecutive calls take."""
    start = clock.mark()
    for _ in range(times):
        multiply()
    end = clock.mark()
    clock.wait(end)
    return clock.seconds(start, end)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
