"""What measuring costs: step time with and without the event line and rank statistics.

    python benchmarks/cost_of_measuring.py [--pairs 12] [--steps 60]

Both sides train tiny-llama on two ranks, in turn. The bare side drops the event line, the memory
readings, the clock marks and the communication hook. The contract is 1 % at a step of 0.2 s, which two
standard errors above the median must not exceed.
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

import numpy as np

from paceline.core.steps import Step, Steps
from paceline.core.window import steady_window
from paceline.engines import engine
from paceline.events import read_rank
from paceline.launchers import local
from paceline.plan import Request, make_plan
from paceline.probe.inventory import cpu
from paceline.rundir import write_text

LIMIT = 0.01
HERE = Path(__file__).parent


def train(steps: int, bare: bool) -> float:
    """Median steady step in seconds of one run with or without measuring."""
    plan = make_plan(Request("tiny-llama", overrides=(f"steps={steps}",), devices=2))
    job = engine("native").job(plan.spec, "cost")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        local.prepare(job, folder)
        script = local.render(job)
        if bare:
            script = script.replace("native/main.py", str(HERE / "_bare_trainer.py"))
        write_text(folder / "job.sh", script)
        subprocess.run(["bash", str(folder / "job.sh")], check=True, capture_output=True)
        return steady_median_s(bare_times(folder) if bare else event_times(folder))


def event_times(folder: Path) -> list[float]:
    """Step times as the event lines of rank 0 tell them, the first left out."""
    lines = (folder / "steps" / "rank-00000.jsonl").read_text().splitlines()
    return [step.step_time_s or 0.0 for step in read_rank(lines).steps][1:]


def bare_times(folder: Path) -> list[float]:
    """Step times from the bare trainer's clock readings."""
    return json.loads((folder / "bare.json").read_text())


def steady_median_s(times: list[float]) -> float:
    """Median of the steady window in seconds."""
    steps = Steps.of(Step(index=i, step_time_s=t) for i, t in enumerate(times, start=1))
    return float(np.median(steps["step_time_s"][steady_window(steps).rows]))


def median_interval(ordered: list[float]) -> tuple[float, float]:
    """95 % interval of the median of sorted values: the k-th from either end (binomial)."""
    n = len(ordered)
    rank, tail = 0, 0.5**n
    while tail <= 0.025:
        rank += 1
        tail += comb(n, rank) * 0.5**n
    outer = max(rank - 1, 0)
    return ordered[outer], ordered[n - 1 - outer]


def main() -> int:
    """Print and store the cost; 1 when it is beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args()
    train(10, True)
    pairs = [(train(chosen.steps, False), train(chosen.steps, True)) for _ in range(chosen.pairs)]
    costs = sorted(measured / bare - 1 for measured, bare in pairs)
    low, high = median_interval(costs)
    result = {
        "benchmark": "cost_of_measuring", "cpu": cpu(), "limit": LIMIT,
        "bare_step_time_s": median(bare for _, bare in pairs),
        "cost": {"median": median(costs), "low": low, "high": high, "pairs": costs},
    }  # fmt: skip
    write_text(HERE / "results" / "cost_of_measuring.json", json.dumps(result, indent=2) + "\n")
    print(
        f"measuring costs {median(costs):+.2%} (95 % interval {low:+.2%} to {high:+.2%}, "
        f"n {len(costs)} pairs) of a {result['bare_step_time_s']:.3f} s step; limit {LIMIT:.0%}"
    )
    return int(high > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
