"""The memory model against torch's memory tracker, on layouts that nobody here could run.

    python benchmarks/memory_trace.py

The trainer's own step is followed on tensors without memory, rank by rank (`paceline estimate
--trace-memory`). A row is the rank of a layout that needs most: live tensors at its peak, traced
and estimated. At least 20 layouts must be within 5%; a missed target makes the exit code 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _result import Surroundings, keep

from paceline.estimate.memory_trace import trace
from paceline.estimate.request import EstimateRequest

CLOSE, FEWEST = 0.05, 20
ONE = ("layout.cp=1", "layout.tp=1", "layout.micro_batch=1")
LLAMA = (
    "zero_stage=1",
    "zero_stage=2",
    "zero_stage=3",
    "zero_stage=3 recompute=full",
    "zero_stage=3 recompute=selective",
    "zero_stage=3 recompute=budget recompute_budget=0.15",
    "zero_stage=3 recompute=budget recompute_budget=0.5",
    "zero_stage=3 recompute=budget recompute_budget=0.9",
    "zero_stage=3 tp=4 sequence_parallel=true recompute=budget recompute_budget=0.5",
    "zero_stage=1 pp=4 tp=2 recompute=budget recompute_budget=0.3",
    "zero_stage=3 micro_batch=2",
    "zero_stage=1 tp=2",
    "zero_stage=1 tp=4",
    "zero_stage=1 tp=8 sequence_parallel=true",
    "zero_stage=3 tp=4 sequence_parallel=true",
    "zero_stage=3 cp=2",
    "zero_stage=3 cp=4",
    "zero_stage=3 cp=2 cp_exchange=all-to-all",
    "zero_stage=3 cp=2 tp=2",
    "zero_stage=3 dp_shard=8",
    "zero_stage=1 pp=2",
    "zero_stage=1 pp=4",
    "zero_stage=1 pp=4 vp=2",
    "zero_stage=1 pp=4 schedule=gpipe recompute=full",
    "zero_stage=1 pp=4 tp=2 recompute=full",
    "zero_stage=1 pp=2 tp=4 sequence_parallel=true",
)
"""Layouts of Llama 3.1 8B at 8,192 tokens on 64 H100."""
OTHERS = (
    ("gpt-1b3", "V100-SXM-32GB", 16, "zero_stage=1 tp=2 micro_batch=2"),
    ("gpt-1b3", "V100-SXM-32GB", 16, "zero_stage=1 pp=4 micro_batch=1"),
    ("llama2-70b-lora", "H100", 8, "zero_stage=3 recompute=full"),
    ("llama2-70b-lora", "H100", 8, "zero_stage=3 recompute=budget recompute_budget=0.5"),
    ("gpt-1b3", "V100-SXM-32GB", 16, "zero_stage=1 tp=2 recompute=budget recompute_budget=0.5"),
    ("opt-13b-sft", "H100", 8, "zero_stage=3 micro_batch=2"),
)


def measured(recipe: str, device: str, devices: int, layout: str) -> dict[str, Any]:
    """One layout's fullest rank."""
    batch = ("training.global_batch=128",) if recipe == "llama31-8b" else ()
    axes = tuple(f"layout.{axis}" for axis in layout.split())
    outcome = trace(EstimateRequest(recipe, device, devices, overrides=(*ONE, *batch, *axes)))
    most = outcome.largest
    row = {
        "recipe": recipe,
        "device": device,
        "devices": devices,
        "layout": layout,
        "stage": most.stage,
        "traced_bytes": most.trace.peak_bytes,
        "estimated_bytes": most.estimated_bytes,
        "ratio": most.ratio,
        "traced_parts": most.trace.at_peak_bytes,
    }
    print(
        f"| {recipe} {layout} | {most.stage} | {most.trace.peak_bytes / 2**30:.2f} | "
        f"{most.estimated_bytes / 2**30:.2f} | {most.ratio:.3f} |",
        flush=True,
    )
    return row


def main() -> int:
    """Print the table, keep the result; 1 when fewer than 20 layouts are within 5%."""
    around = Surroundings()
    print(
        "| layout | pipeline rank | traced GiB | estimated GiB | ratio |\n|---|---:|---:|---:|---:|"
    )
    cases = [("llama31-8b", "H100", 64, layout) for layout in LLAMA] + list(OTHERS)
    rows = [measured(*case) for case in cases]
    error = np.abs(np.array([row["ratio"] for row in rows]) - 1)
    close = int((error <= CLOSE).sum())
    print(
        f"\n{close} of {len(rows)} layouts within {CLOSE:.0%}; "
        f"median error {np.median(error):.1%}, "
        f"largest {error.max():.1%}"
    )
    keep(
        "memory_trace",
        "bytes of live tensors on one rank",
        around,
        rows=rows,
        within_5=close,
        median_error=float(np.median(error)),
        largest_error=float(error.max()),
    )
    return close < FEWEST


if __name__ == "__main__":
    sys.exit(main())
