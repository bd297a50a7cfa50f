"""Time a model's GEMMs and attention, forward and backward.

Run as python -m paceline.trainer.programs.kernels SETTINGS.

SETTINGS is a JSON object {device, dtype, products: [[m, n, k], ...], attention: [[batch, seq_len,
heads, kv_heads, head_dim], ...], threads, seconds}. Prints a JSON line each: {"event": "product" or
"attention", "shape", "forward_s", "backward_s", "n", "spread", ...}. The backward pass of a GEMM is
two GEMMs, for the gradients of the input and of the weight.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paceline.trainer.measure.clock import clock_of
from paceline.trainer.model.attention import causal_attention
from paceline.trainer.programs.gemm import DTYPES, device_facts, elapsed, relative_spread

MIN_REPEATS, MAX_REPEATS = 3, 30
"""Minimum and maximum repeats of a shape."""
REPEAT_S = 2e-3
"""Minimum time of a repeat; shorter passes are timed in groups."""


def main(settings: dict[str, Any]) -> None:
    """Measure every shape and print its line."""
    device = torch.device(settings["device"])
    if settings.get("threads"):
        torch.set_num_threads(settings["threads"])
    about = device_facts(device)
    for line in passes(settings, device):
        print(json.dumps({**line, **about}), flush=True)


def passes(settings: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a line for every GEMM and every attention, in about `seconds` in total."""
    dtype = DTYPES[settings["dtype"]]
    shapes = [("product", shape) for shape in settings.get("products", [])]
    shapes += [("attention", shape) for shape in settings.get("attention", [])]
    share_s = settings.get("seconds", 4.0) / max(1, len(shapes)) / 2
    for kind, shape in shapes:
        make = _linear if kind == "product" else _attention
        forward, backward = make(shape, dtype, device)
        first, second = repeats(forward, device, share_s), repeats(backward, device, share_s)
        yield {
            "event": kind,
            "shape": list(shape),
            "dtype": settings["dtype"],
            "forward_s": median(first),
            "backward_s": median(second),
            "n": min(len(first), len(second)),
            "spread": max(relative_spread(first), relative_spread(second)),
        }


def repeats(work: Callable[[], object], device: torch.device, share_s: float) -> list[float]:
    """Return the seconds of each repeat, for as many repeats as fit into `share_s`."""
    clock = clock_of(device)
    elapsed(work, clock, 1)
    inner = max(1, round(REPEAT_S / max(elapsed(work, clock, 1), 1e-7)))
    times_s: list[float] = []
    end = time.perf_counter() + share_s
    while len(times_s) < MIN_REPEATS or (len(times_s) < MAX_REPEATS and time.perf_counter() < end):
        times_s.append(elapsed(work, clock, inner) / inner)
    return times_s


def _linear(
    shape: list[int], dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a linear layer from k to n over m tokens, and its two gradients."""
    m, n, k = shape
    x, weight, grad = (_random(size, dtype, device) for size in ((m, k), (n, k), (m, n)))
    return lambda: x @ weight.t(), lambda: (grad @ weight, grad.t() @ x)


def _attention(
    shape: list[int], dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the trainer's own attention, and its gradients."""
    batch, seq_len, heads, kv_heads, width = shape
    sizes = ((batch, seq_len, count, width) for count in (heads, kv_heads, kv_heads))
    q, k, v = (_random(size, dtype, device).requires_grad_() for size in sizes)
    out = causal_attention(q, k, v)
    grad = _random(out.shape, dtype, device)

    def forward() -> Tensor:
        with torch.no_grad():
            return causal_attention(q, k, v)

    return forward, lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def _random(size: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*size, device=device, dtype=torch.float32).to(dtype)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
