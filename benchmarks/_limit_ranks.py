"""One rank that measures what a CPU can do: products, memory, exchanges, and the last two at once.

    _limit_ranks.py QUESTION.json ANSWER.json

The question is {repeats, threads}; the answer maps names to the values of every repeat.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from paceline.trainer.parallel.mesh import join_world

SIZE, SMALL_SIZE = 1024, 256
COPIED_BYTES = 2**28
EXCHANGED_BYTES = (4, 2**16, 2**24)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Values = dict[str, list[float]]


def seconds(work: Callable[[], Any]) -> float:
    """Wall seconds of some work."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def products(repeats: int) -> Values:
    """FLOP/s of square products; fp16 only small ones, which take long enough."""
    rates: Values = {}
    for precision, dtype in (
        ("high", "fp32"),
        ("medium", "fp32"),
        ("high", "bf16"),
        ("high", "fp16"),
    ):
        torch.set_float32_matmul_precision(precision)
        size = SMALL_SIZE if dtype == "fp16" else SIZE
        a, b = torch.randn(2, size, size).to(DTYPES[dtype])
        torch.mm(a, b)
        rates[f"{dtype} products, matmul_precision {precision}, FLOP/s"] = [
            2.0 * size**3 / seconds(lambda a=a, b=b: torch.mm(a, b)) for _ in range(repeats)
        ]
    return rates


def copies(repeats: int, threads: int) -> Values:
    """Bytes read and written per second by copies that no cache holds."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    target, rates = torch.empty_like(source), Values()
    for count in (1, threads):
        torch.set_num_threads(count)
        target.copy_(source)
        rates[f"copy, {count} threads, bytes/s"] = [
            2.0 * COPIED_BYTES / seconds(lambda: target.copy_(source)) for _ in range(repeats)
        ]
    return rates


def exchanges(repeats: int) -> Values:
    """Seconds of an all-reduce by size, and what of one hides behind a product meanwhile."""
    torch.set_num_threads(1)
    times: Values = {}
    for size in EXCHANGED_BYTES:
        x = torch.zeros(max(1, size // 4))
        times[f"all-reduce of {size} bytes, s"] = [
            alone(lambda x=x: dist.all_reduce(x)) for _ in range(repeats)
        ]
    x, (a, b) = torch.zeros(EXCHANGED_BYTES[-1] // 4), torch.randn(2, SIZE, SIZE)

    def both() -> None:
        work = dist.all_reduce(x, async_op=True)
        torch.mm(a, b)
        assert work is not None
        work.wait()

    hidden: list[float] = []
    for _ in range(repeats):
        product, exchange = alone(lambda: torch.mm(a, b)), alone(lambda: dist.all_reduce(x))
        hidden.append((product + exchange - alone(both)) / min(product, exchange))
    return {**times, "part of an all-reduce or product hidden behind the other, 0-1": hidden}


def alone(work: Callable[[], Any]) -> float:
    """Seconds of some work that all ranks begin together."""
    dist.barrier()
    return seconds(work)


def main(question: Path, into: Path) -> None:
    """Measure; a world of one measures what needs no other rank."""
    order, world = json.loads(question.read_text()), join_world("cpu")
    torch.set_num_threads(order["threads"])
    if world.size == 1:
        values = {**products(order["repeats"]), **copies(order["repeats"], order["threads"])}
    else:
        values = exchanges(order["repeats"])
    into.with_name(f"{world.rank}-{into.name}").write_text(json.dumps(values))
    sys.stdout.flush()
    if world.size > 1:
        dist.barrier()
    os._exit(0)  # gloo's threads may abort a normal exit


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
