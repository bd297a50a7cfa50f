"""Loss deviation of each low precision over 50 steps, and its speed, relative to bf16.

    python benchmarks/low_precision.py [--steps 50] [--shape tiny-llama ...]

All sides train the same shape on the same samples from the same weights, each in a process of its
own. Off is |loss - bf16's| / bf16's of the same step: its largest, its mean over the steps, and the
last step's with its sign. Yardsticks: bf16 once more, and bf16 from another seed, whose weights and
order of samples differ. It needs a GPU, because the trainer refuses low precision on CPUs. What a
GPU does not multiply is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from _low_precision import HEADER, ON_A_GPU, SHAPES, SIDES, STEPS, Deviations
from _result import Surroundings, keep
from gpu_proof import Call, native_training

from paceline.machines.probe.gpus import gpus

LIMIT_S = 7200.0
"""Time limit of all trainings together."""


def of_shape(name: str, call: Call, steps: int) -> list[dict[str, Any]]:
    """The rows of all sides of a shape, the refused ones with their reason."""
    shape = {**SHAPES, **ON_A_GPU}[name]
    sides = Deviations(shape, call.device_name, steps, lambda spec: native_training(spec, call))
    for side in SIDES:
        print(sides.measure(side), flush=True)
    return [{"shape": name, **row} for row in sides.rows]


def main() -> int:
    """Train all sides of all shapes, print the table, and keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--shape", nargs="+", default=[], choices=[*SHAPES, *ON_A_GPU])
    parser.add_argument("--result", default="low_precision", help="Name of the result file.")
    options = parser.parse_args()
    devices = gpus()
    if not devices:
        print(json.dumps({"benchmark": "low_precision", "skipped": "no visible NVIDIA GPU here"}))
        return 0
    around = Surroundings()
    call = Call("cuda", devices[0]["name"], time.monotonic() + LIMIT_S)
    print(HEADER)
    rows: list[dict[str, Any]] = []
    for name in options.shape or [*SHAPES, *ON_A_GPU]:
        rows += of_shape(name, call, options.steps)
        keep(
            options.result,
            "shares of bf16's loss; ratios of tokens/s",
            around,
            device=call.device_name,
            steps=options.steps,
            rows=rows,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
