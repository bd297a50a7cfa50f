"""GEMMs at the best rate that this machine reaches: _products_in_turns.py FILE BLOCK.

A step is STEP_FLOPS of the best of the probe's shapes, chosen by every process; FILE is
trainer.json, of which dtype, threads and fp32 matrix-product setting are taken.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from _turns import BlockTimer

sys.path.insert(0, str(Path(__file__).parents[1]))

from paceline.trainer.measure.clock import HostClock
from paceline.trainer.programs import gemm

STEP_FLOPS = 2.0**36
"""About 0.07 s at 1 TFLOP/s; every shape of the probe divides it."""
CHOOSING_S = 3.0


def main(path: str, block: int) -> None:
    """Multiply until nobody wants another block."""
    content = json.loads(Path(path).read_text())
    turn, device, dtype = BlockTimer(block), torch.device("cpu"), content["training"]["dtype"]
    turn.step()
    torch.set_num_threads(content["threads"])
    torch.set_float32_matmul_precision(content["training"]["matmul_precision"])
    lines = gemm.measure_dtype(dtype, device, HostClock(), CHOOSING_S)
    rates = {tuple(line["shape"]): line["flops_per_s"] for line in lines if "flops_per_s" in line}
    best = max(rates, key=lambda shape: rates[shape])
    multiply = gemm.make_gemm(dtype, best, device)
    while True:
        gemm.elapsed(multiply, HostClock(), round(STEP_FLOPS / gemm.flops(best)))
        turn.step()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
