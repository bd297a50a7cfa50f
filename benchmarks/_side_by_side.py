"""The native trainer against a plain loop: pairs of trainings in processes of their own.

Each side trains the same shape with the same settings file, in turn (A B A B ...). A figure is the
median steady step of its process; ratios are taken inside a pair, so a machine that changes speed
changes both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from _result import Surroundings, keep, spread_of, spread_text

from paceline.core.hardware import Cluster
from paceline.core.steps import Step, Steps
from paceline.core.window import steady_window
from paceline.engines import native
from paceline.files.events import read_rank
from paceline.files.recipe import load_recipe, resolve
from paceline.files.trainer_program import write_program
from paceline.machines.probe.inventory import usable_cores

HERE = Path(__file__).parent
SHAPES: dict[str, list[str]] = {
    "tiny-llama": [],
    "6 x 256, vocabulary 8192": [
        "model.num_layers=6",
        "model.ffn_size=688",
        "model.num_kv_heads=8",
        "model.vocab_size=8192",
    ],
}


def settings(overrides: list[str], dtype: str, steps: int) -> dict[str, Any]:
    """The native trainer's settings for one process on all cores."""
    recipe = load_recipe(
        "tiny-llama",
        None,
        [*overrides, f"dtype={dtype}", f"steps={steps}", "data.source=synthetic"],
    )
    cluster = Cluster(
        name="here", device="cpu", devices_per_node=1, threads_per_device=usable_cores()
    )
    return native.settings(resolve(recipe, cluster, True, None))


def native_steps(content: dict[str, Any], folder: Path) -> tuple[list[Step], int]:
    """Steps and parameter count of the native trainer, from its event lines.

    Raises RuntimeError with the end of its log when it fails.
    """
    (folder / "trainer.json").write_text(json.dumps(content))
    for name in ("steps", "logs"):
        (folder / name).mkdir()
    command = [sys.executable, str(write_program("main", folder)), "trainer.json"]
    result = subprocess.run(command, cwd=folder, env=_environment(content))
    if result.returncode:
        raise RuntimeError((folder / "logs" / "rank-00000.log").read_text()[-3000:])
    log = read_rank((folder / "steps" / "rank-00000.jsonl").read_text().splitlines())
    assert log.start is not None
    return list(log.steps), log.start.num_parameters


def peer_steps(program: str, content: dict[str, Any], folder: Path) -> tuple[list[Step], int]:
    """Steps and parameter count of a plain loop."""
    path = folder / "peer.json"
    path.write_text(json.dumps(content))
    result = subprocess.run(
        [sys.executable, str(HERE / program), str(path)],
        check=True,
        capture_output=True,
        text=True,
        env=_environment(content),
    )
    answer = json.loads(result.stdout.splitlines()[-1])
    times = enumerate(answer["step_time_s"], start=1)
    return [Step(index=i, step_time_s=t) for i, t in times], answer["num_parameters"]


def steady_median_s(timed_steps: list[Step]) -> float:
    """Median of the steady window in seconds."""
    steps = Steps.of(timed_steps)
    return float(median(steps["step_time_s"][steady_window(steps).rows]))


def compare(
    program: str, overrides: list[str], dtype: str, pairs: int, steps: int
) -> dict[str, Any]:
    """Pairs of (native, peer) tokens/s and their ratios."""
    content = settings(overrides, dtype, steps)
    tokens = content["training"]["global_batch"] * content["training"]["seq_len"]
    rates: list[tuple[float, float]] = []
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as name:
            ours, our_parameters = native_steps(content, Path(name))
            theirs, their_parameters = peer_steps(program, content, Path(name))
        assert our_parameters == their_parameters, "the two models differ"
        rates.append((tokens / steady_median_s(ours), tokens / steady_median_s(theirs)))
    return {
        "dtype": dtype,
        "native_tokens_per_s": spread_of([ours for ours, _ in rates]),
        "peer_tokens_per_s": spread_of([theirs for _, theirs in rates]),
        "ratio": spread_of([ours / theirs for ours, theirs in rates]),
    }


def _environment(content: dict[str, Any]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(content["threads"])}


def main(benchmark: str, peer: str, program: str, description: str | None) -> int:
    """Run every shape and dtype, print a table, write benchmarks/results/; 1 when slower."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    around = Surroundings()
    rows: list[dict[str, Any]] = []
    print(f"| shape | dtype | native tokens/s | {peer} tokens/s | ratio (min-max, n) |")
    print("|---|---|---:|---:|---:|")
    for shape, overrides in SHAPES.items():
        for dtype in ("fp32", "bf16"):
            row = compare(program, overrides, dtype, options.pairs, options.steps)
            rows.append({"shape": shape, **row})
            print(
                f"| {shape} | {dtype} | {row['native_tokens_per_s']['median']:,.0f} "
                f"| {row['peer_tokens_per_s']['median']:,.0f} "
                f"| {spread_text(row['ratio'])}, {row['ratio']['n']} |",
                flush=True,
            )
    keep(benchmark, "tokens/s; ratio of native to peer", around, peer=peer, rows=rows)
    return int(any(row["ratio"]["median"] < 1 for row in rows))
