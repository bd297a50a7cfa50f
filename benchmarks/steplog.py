"""Overhead of `paceline.steplog` in a training loop: steps of 0.1 s with and without it, in turn.

    python benchmarks/steplog.py [--pairs 200]

A step sleeps, as a program does that waits for its GPU, so that what else runs disturbs it least.
The measured one marks its waits for data and for other ranks and tells tokens, samples and the loss
of a tensor; the file lies on a disk. The contract is 1%: the upper end of the median's 95%
interval (by order statistics of the pairs) must not exceed it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from _result import Surroundings, keep
from cost_of_measuring import median_interval

from paceline import steplog

LIMIT = 0.01
STEP_S = 0.1
WARMUP_PAIRS = 5
LOSS = torch.tensor(2.5)
Cost = tuple[float, float]
"""Seconds by the clock and of the processor."""


def bare() -> None:
    """One step of a loop that nobody measures."""
    time.sleep(STEP_S)


def measured() -> None:
    """The same step, told to steplog with everything that it takes."""
    with steplog.waiting_for_data():
        pass
    with steplog.step(tokens=8192, samples=4) as step:
        time.sleep(STEP_S)
        with steplog.waiting_for_ranks():
            pass
        step.loss = LOSS


def cost(side: Callable[[], None]) -> Cost:
    """Return the time of one call of a side."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    side()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def in_turn(pairs: int) -> list[tuple[Cost, Cost]]:
    """(measured, bare) of neighbouring steps; who goes first alternates."""
    costs: list[tuple[Cost, Cost]] = []
    for pair in range(WARMUP_PAIRS + pairs):
        sides = (measured, bare) if pair % 2 else (bare, measured)
        by_side = {side: cost(side) for side in sides}
        costs.append((by_side[measured], by_side[bare]))
    return costs[WARMUP_PAIRS:]


def main() -> int:
    """Print and store the cost; 1 when it may be beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    pairs, around = parser.parse_args().pairs, Surroundings()
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        steplog.begin(folder)
        costs = in_turn(pairs)
    shares = sorted(with_it[0] / without[0] - 1 for with_it, without in costs)
    low, high = median_interval(shares)
    cpu_s = median(with_it[1] - without[1] for with_it, without in costs)
    figures = {"median": median(shares), "low": low, "high": high, "pairs": shares}
    keep(
        "steplog",
        "fraction of a step",
        around,
        limit=LIMIT,
        step_time_s=median(without[0] for _, without in costs),
        processor_s_per_step=cpu_s,
        cost=figures,
    )
    print(
        f"steplog costs {median(shares):+.3%} (95% interval {low:+.3%} to {high:+.3%}, n "
        f"{len(shares)} pairs) of a {STEP_S} s step, {1e6 * cpu_s:.0f} us of the processor; "
        f"limit {LIMIT:.0%}"
    )
    return int(high > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
