"""Overhead of each kind of parallelism: tokens/s of N processes relative to one, and the causes.

    python benchmarks/parallel_overheads.py [--rounds 7] [--dtype fp32] [--quick]

All layouts train the same model on the same global batch, on 2 and 4 processes with one thread
each; the reference is one process with as many threads as there are cores. Both take steps in turn
inside one world, so ratios are of neighbouring steps. A step's length is processor time / (cores x
their share in use), so the loss has two parts: more processor time than the reference, and idle
cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from _result import Surroundings, keep, spread_of, spread_text
from _worlds import settings, start

from paceline.machines.probe.inventory import usable_cores

MODEL = ("model.num_layers=8",)
"""tiny-llama with layers for 4 x 2 stages."""
BATCH = 8
SCHEDULES = {"gpipe": "", "1f1b": "", "interleaved": " vp=2", "zero-bubble": ""}
Row = dict[str, Any]


def layouts(ranks: int) -> dict[str, list[str]]:
    """Return the layouts of `ranks` processes by printed name: fields of the recipe's layout."""
    if ranks == 1:
        return {"one process, micro-batches of 1": ["micro_batch=1"]}
    share = f"micro_batch={BATCH // ranks}"
    whole = f"micro_batch={BATCH}"
    return {
        **{f"ZeRO-{z}, dp {ranks}": [share, f"zero_stage={z}"] for z in range(4)},
        f"tp {ranks}": [whole, f"tp={ranks}"],
        f"tp {ranks} with sequence parallelism": [whole, f"tp={ranks}", "sequence_parallel=true"],
        **{
            f"pp {ranks}{vp.replace('=', ' ')}, {name}": [
                "micro_batch=1",
                f"pp={ranks}",
                f"schedule={name}",
                *vp.split(),
            ]
            for name, vp in SCHEDULES.items()
        },
        **{
            f"cp {ranks}, {name}": [whole, f"cp={ranks}", f"cp_exchange={name}"]
            for name in ("all-gather", "all-to-all", "ring")
        },
    }


def raw(ranks: int, dtype: str, words: list[str], threads: int = 1) -> dict[str, Any]:
    """trainer.json of a layout."""
    fields = [f"layout.{word}" for word in words]
    return settings(
        ranks, *MODEL, *fields, f"global_batch={BATCH}", f"dtype={dtype}", threads=threads
    )


def row(name: str, ranks: int, cores: int, by_rank: list[list[Any]]) -> Row:
    """Ratios of each round's neighbouring steps; a step takes as long as its slowest rank."""
    ratios, processor, others, idle, waits = [], [], [], [], []
    for turn in zip(*by_rank, strict=True):
        reference, steps = turn[0][0], [figures for _, figures in turn]
        took = max(step["step_time_s"] for step in steps)
        cpu = sum(step["cpu_s"] for step in steps)
        ratios.append(reference["step_time_s"] / took)
        processor.append(cpu / reference["cpu_s"])
        others.append(sum(step["cpu_s"] - step["own_s"] for step in steps) / cpu)
        idle.append(1 - cpu / (cores * took))
        waits.append(mean(step["comm_wait_s"] / step["step_time_s"] for step in steps))
    references = [turn[0] for turn in by_rank[0]]
    return {
        "layout": name,
        "processes": ranks,
        "tokens_per_s_ratio": spread_of(ratios),
        "comm_wait_share": spread_of(waits),
        "processor_time_ratio": spread_of(processor),
        "processor_time_of_other_threads": spread_of(others),
        "idle_cores": spread_of(idle),
        "reference_step_time_s": spread_of([r["step_time_s"] for r in references]),
        "reference_idle_cores": spread_of(
            [1 - r["cpu_s"] / (cores * r["step_time_s"]) for r in references]
        ),
    }


def rows_of(ranks: int, dtype: str, rounds: int, cores: int) -> list[Row]:
    """All layouts of one world."""
    layouts_by_name, threads = layouts(ranks), 1 if ranks > 1 else cores
    question = {
        "reference": raw(1, dtype, [f"micro_batch={BATCH}"], threads=cores),
        "layouts": [raw(ranks, dtype, words, threads) for words in layouts_by_name.values()],
        "rounds": rounds,
        "threads": cores,
        "threads_of_a_rank": threads,
    }
    with tempfile.TemporaryDirectory() as folder:
        answers = start("_layout_ranks.py", ranks, question, Path(folder))
    return [
        row(name, ranks, cores, [answer[i] for answer in answers])
        for i, name in enumerate(layouts_by_name)
    ]


def main() -> int:
    """Measure, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--quick", action="store_true", help="2 processes; nothing is written.")
    options = parser.parse_args()
    around, cores = Surroundings(), usable_cores()
    print(
        "| processes | layout | tokens/s, ratio (min-max) | blocked in collectives "
        "| processor time, ratio | of that other threads | idle cores |"
    )
    print("|---:|---|---:|---:|---:|---:|---:|")
    rows: list[Row] = []
    for ranks in (2,) if options.quick else (1, 2, 4):
        for r in rows_of(ranks, options.dtype, options.rounds, cores):
            rows.append(r)
            print(
                f"| {ranks} | {r['layout']} | {spread_text(r['tokens_per_s_ratio'], 2)} "
                f"| {r['comm_wait_share']['median']:.0%} "
                f"| {r['processor_time_ratio']['median']:.2f} "
                f"| {r['processor_time_of_other_threads']['median']:.0%} "
                f"| {r['idle_cores']['median']:.0%} |",
                flush=True,
            )
    if not options.quick:
        keep(
            "parallel_overheads",
            "ratio to one process on all cores",
            around,
            dtype=options.dtype,
            cores=cores,
            global_batch=BATCH,
            rows=rows,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
