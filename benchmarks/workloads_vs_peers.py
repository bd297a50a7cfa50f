"""Step time of each tiny workload against a plain loop over transformers or peft, in turns.

    python benchmarks/workloads_vs_peers.py [--pairs 12] [--block 5] [--threads N] [--only WORD]

Both sides train the same model with equal settings (batch, dtype, frozen weights' dtype, adapters,
recomputation, threads, fp32 matrix-product setting, allocator setting, garbage collection) in a
process of their own, by turns, block by block of some steps. A ratio is the peer's time over the
native trainer's in neighbouring blocks: above 1 the native trainer is faster. Time is by the clock,
and next to it the processor's, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from _result import Surroundings, keep, spread_of, spread_text
from _turns import Training, in_turn

from paceline.core.hardware import Cluster
from paceline.engines import native
from paceline.files.recipe import load_recipe, resolve
from paceline.machines.probe.inventory import usable_cores

WARMUP_BLOCKS, MORE_STEPS_THAN_ANY = 2, 1_000_000
PLAIN = [
    "data.source=synthetic",
    "data.packing=packed",
    "layout.zero_stage=0",
    "layout.cp=1",
    "training.ramp_up=null",
    f"steps={MORE_STEPS_THAN_ANY}",
]
"""Settings that a loop on one process does not need."""

WORKLOADS: dict[str, tuple[str, list[str]]] = {
    "opt-350m-sft-tiny": ("opt-350m-sft-tiny", []),
    "opt-13b-sft-tiny (LoRA)": ("opt-13b-sft-tiny", []),
    "opt-13b-sft-tiny, no recomputation": ("opt-13b-sft-tiny", ["layout.recompute=none"]),
    "llama31-8b-tiny": ("llama31-8b-tiny", ["layout.micro_batch=4"]),
    "llama2-70b-lora-tiny": ("llama2-70b-lora-tiny", ["layout.micro_batch=8"]),
    "gpt-1b3-tiny": ("gpt-1b3-tiny", ["layout.micro_batch=16"]),
    "gpt-1b3-tiny, no recomputation": (
        "gpt-1b3-tiny",
        ["layout.micro_batch=16", "layout.recompute=none"],
    ),
}
"""Recipe, and what makes its whole batch one micro-batch."""


def settings(recipe: str, overrides: list[str], dtype: str, threads: int) -> dict[str, Any]:
    """trainer.json of one process."""
    changes = [*PLAIN, *overrides, f"dtype={dtype}"]
    cluster = Cluster(name="here", device="cpu", devices_per_node=1, threads_per_device=threads)
    return native.settings(resolve(load_recipe(recipe, None, changes), cluster, True, None))


def compare(
    content: dict[str, Any], pairs: int, block: int, peer: str = "_peer_in_turns.py"
) -> dict[str, Any]:
    """Step times of both sides and their ratios, by the clock and of the processor."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "steps").mkdir()
        path = folder / "trainer.json"
        path.write_text(json.dumps(content))
        sides = [
            Training.of_file(program, path, block, content["threads"])
            for program in ("_native_in_turns.py", peer)
        ]
        try:
            costs = in_turn(sides, pairs, WARMUP_BLOCKS)
        finally:
            for side in sides:
                side.end()
    row: dict[str, Any] = {"block_steps": block}
    for kind, at in (("wall", 0), ("processor", 1)):
        row[kind] = {
            "native_step_time_s": spread_of([ours[at] for ours, _ in costs]),
            "peer_step_time_s": spread_of([theirs[at] for _, theirs in costs]),
            "ratio": spread_of([theirs[at] / ours[at] for ours, theirs in costs]),
        }
    return row


def main() -> int:
    """Run every workload in fp32 and bf16, print and keep the figures; 1 when one is slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument(
        "--only", default="", help="Run only workloads whose name contains this text."
    )
    parser.add_argument("--dtype", default=["fp32", "bf16"], nargs="+")
    options = parser.parse_args()
    around = Surroundings()
    rows: list[dict[str, Any]] = []
    print(
        "| workload | dtype | native ms | peer ms | ratio (min-max) | of processor time | pairs |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for name, (recipe, overrides) in WORKLOADS.items():
        for dtype in options.dtype if options.only in name else ():
            content = settings(recipe, overrides, dtype, options.threads)
            row = compare(content, options.pairs, options.block)
            rows.append({"workload": name, "dtype": dtype, "threads": options.threads, **row})
            wall, cpu = row["wall"], row["processor"]
            native_ms, peer_ms = (
                1e3 * wall[f"{side}_step_time_s"]["median"] for side in ("native", "peer")
            )
            print(
                f"| {name} | {dtype} | {native_ms:.1f} | {peer_ms:.1f} "
                f"| {spread_text(wall['ratio'])} | {spread_text(cpu['ratio'])} | {options.pairs} |",
                flush=True,
            )
    if not options.only:
        keep("workloads_vs_peers", "s a step; ratio of peer to native", around, rows=rows)
    return int(any(row["wall"]["ratio"]["median"] < 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
