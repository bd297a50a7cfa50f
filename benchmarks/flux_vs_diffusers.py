"""Step time of the tiny Flux against a plain loop over diffusers' transformer, in turns.

    python benchmarks/flux_vs_diffusers.py [--pairs 12] [--block 5] [--threads N]

As workloads_vs_peers.py: both sides train the same model with equal settings in a process of their
own, block by block. A ratio is the peer's time over the native trainer's: above 1 the native
trainer is faster. The peer trains on one batch again and again; the native trainer draws every
batch again.

Two threads of one side can wait for each other on a machine that others use, while the other side
gets by with one: such a ratio says nothing of the programs. So nothing is kept, and the exit code
is 2, when the sides used different numbers of cores (processor time over the clock's).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from _result import Surroundings, keep, spread_text
from workloads_vs_peers import compare, settings

from paceline.machines.probe.inventory import usable_cores

SAME_CORES = 0.25
"""Largest relative difference of the cores that both sides used."""

SHAPES: dict[str, list[str]] = {
    "flux1-schnell-tiny": [],
    "the same, text and image of 256 tokens each": [
        "model.latent_size=32",
        "model.text_len=256",
        "seq_len=512",
        "training.batch_per_device=2",
        "layout.micro_batch=2",
    ],
}


def cores(row: dict[str, Any], side: str) -> float:
    """Return the number of cores that a side used."""
    name = f"{side}_step_time_s"
    return row["processor"][name]["median"] / row["wall"][name]["median"]


def main() -> int:
    """Run every shape in fp32 and bf16, print a table, write the result; 1 when one is slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--dtype", default=["fp32", "bf16"], nargs="+")
    options = parser.parse_args()
    around = Surroundings()
    rows: list[dict[str, Any]] = []
    print(
        "| shape | dtype | native ms | diffusers ms | ratio (min-max) | of processor time "
        "| cores | pairs |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for name, overrides in SHAPES.items():
        for dtype in options.dtype:
            content = settings("flux1-schnell-tiny", overrides, dtype, options.threads)
            row = compare(content, options.pairs, options.block, "_diffusers_in_turns.py")
            rows.append({"shape": name, "dtype": dtype, "threads": options.threads, **row})
            wall, cpu = row["wall"], row["processor"]
            native_ms, peer_ms = (
                1e3 * wall[f"{side}_step_time_s"]["median"] for side in ("native", "peer")
            )
            print(
                f"| {name} | {dtype} | {native_ms:.1f} | {peer_ms:.1f} "
                f"| {spread_text(wall['ratio'])} | {spread_text(cpu['ratio'])} "
                f"| {cores(row, 'native'):.2f}, {cores(row, 'peer'):.2f} "
                f"| {options.pairs} |",
                flush=True,
            )
    uneven = [r for r in rows if abs(cores(r, "native") / cores(r, "peer") - 1) > SAME_CORES]
    if uneven:
        print("no result: the two sides did not use the same number of cores", file=sys.stderr)
        return 2
    keep("flux_vs_diffusers", "s a step; ratio of peer to native", around, rows=rows)
    return int(any(row["wall"]["ratio"]["median"] < 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
