"""Cost of measuring: step time with and without the event line and rank statistics.

    python benchmarks/cost_of_measuring.py [--pairs 40]

One training of tiny-llama on two ranks measures in every other block of ten steps; a pair is a
measured block and the bare one after it. The contract is 1% at a step of 0.2 s: the upper end of
the median's 95% interval (by order statistics of the pairs) must not exceed it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from math import comb
from pathlib import Path
from statistics import median

from paceline.files.documents import write_text
from paceline.machines import local
from paceline.machines.placement import Request
from paceline.machines.probe.inventory import cpu
from paceline.runs.plan import make_plan

LIMIT = 0.01
BLOCK_STEPS = 10
WARMUP_BLOCKS = 2
HERE = Path(__file__).parent


def train(num_blocks: int) -> list[list[float]]:
    """Seconds of each step, by block; blocks with an even number are measured."""
    steps = num_blocks * BLOCK_STEPS
    plan = make_plan(Request("tiny-llama", overrides=(f"steps={steps}",), devices=2))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        local.prepare(plan.job, folder)
        program = str(HERE / "_toggled_trainer.py")
        write_text(
            folder / "job.sh",
            plan.script.replace("trainer trainer.json", f"{program} trainer.json"),
        )
        subprocess.run(["bash", str(folder / "job.sh")], check=True, capture_output=True)
        return json.loads((folder / "blocks.json").read_text())


def median_interval(values: list[float]) -> tuple[float, float]:
    """95% interval of the median of sorted values: the k-th from either end (binomial)."""
    n = len(values)
    rank, tail = 0, 0.5**n
    while tail <= 0.025:
        rank += 1
        tail += comb(n, rank) * 0.5**n
    outer = max(rank - 1, 0)
    return values[outer], values[n - 1 - outer]


def main() -> int:
    """Print and store the cost; 1 when it may be beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    blocks = train(WARMUP_BLOCKS + 2 * parser.parse_args().pairs)[WARMUP_BLOCKS:]
    medians = [median(block) for block in blocks if len(block) == BLOCK_STEPS]
    pairs = list(zip(medians[::2], medians[1::2], strict=False))
    costs = sorted(measured / bare - 1 for measured, bare in pairs)
    low, high = median_interval(costs)
    result = {
        "benchmark": "cost_of_measuring",
        "cpu": cpu(),
        "limit": LIMIT,
        "bare_step_time_s": median(bare for _, bare in pairs),
        "cost": {"median": median(costs), "low": low, "high": high, "pairs": costs},
    }
    path = HERE / "results" / "cost_of_measuring.json"
    write_text(path, json.dumps(result, indent=2) + "\n")
    print(
        f"measuring costs {median(costs):+.2%} (95% interval {low:+.2%} to {high:+.2%}, "
        f"n {len(costs)} pairs) of a {result['bare_step_time_s']:.3f} s step; limit {LIMIT:.0%}"
    )
    return int(high > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
