"""tokens/s of the native trainer against a plain loop over transformers, pair by pair.

    python benchmarks/trainer_vs_transformers.py [--pairs 5] [--steps 25]

Both train the same Llama in a process of its own, in turn (A B A B ...), with the same shape, dtype,
batch, threads and matrix-product setting; each figure is the median steady step of its process. Ratios are taken inside a
pair, so a machine that changes speed changes both sides.
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

from paceline.core.hardware import Cluster
from paceline.core.steps import Step, Steps
from paceline.core.window import steady_window
from paceline.engines import native
from paceline.probe.inventory import cpu, usable_cores
from paceline.recipe import load_recipe, resolve
from paceline.rundir import write_text

HERE = Path(__file__).parent
SHAPES: dict[str, list[str]] = {
    "tiny-llama": [],
    "6 x 256, vocabulary 8192": [
        "model.num_layers=6", "model.ffn_size=688", "model.num_kv_heads=8", "model.vocab_size=8192",
    ],
}  # fmt: skip


def settings(overrides: list[str], dtype: str, steps: int) -> dict[str, Any]:
    """The native trainer's settings for one process on all cores."""
    recipe = load_recipe("tiny-llama", None, [*overrides, f"dtype={dtype}", f"steps={steps}",
                                              "data.source=synthetic"])  # fmt: skip
    cluster = Cluster(
        name="here", device="cpu", devices_per_node=1, threads_per_device=usable_cores()
    )
    return native.settings(resolve(recipe, cluster, True, None))


def native_times(content: dict[str, Any], folder: Path) -> tuple[list[float], int]:
    """Step times and parameter count of the native trainer, from its event lines."""
    (folder / "trainer.json").write_text(json.dumps(content))
    for name in ("steps", "logs"):
        (folder / name).mkdir()
    program = Path(native.__file__).parents[1] / "native" / "main.py"
    subprocess.run([sys.executable, str(program), "trainer.json"], cwd=folder, check=True,
                   env=_environment(content))  # fmt: skip
    log = native.read_rank((folder / "steps" / "rank-00000.jsonl").read_text().splitlines())
    assert log.start is not None
    return [s.step_time_s or 0.0 for s in log.steps], log.start.num_parameters


def peer_times(content: dict[str, Any], folder: Path) -> tuple[list[float], int]:
    """Step times and parameter count of the plain loop."""
    path = folder / "peer.json"
    path.write_text(json.dumps(content))
    done = subprocess.run(
        [sys.executable, str(HERE / "_plain_transformers.py"), str(path)],
        check=True, capture_output=True, text=True, env=_environment(content),
    )  # fmt: skip
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["step_time_s"], answer["num_parameters"]


def steady_median_s(times: list[float]) -> float:
    """Median of the steady window in seconds."""
    steps = Steps.of(Step(index=i, step_time_s=t) for i, t in enumerate(times, start=1))
    window = steady_window(steps)
    return float(median(steps["step_time_s"][window.rows]))


def compare(overrides: list[str], dtype: str, pairs: int, steps: int) -> dict[str, Any]:
    """Pairs of (native, peer) tokens/s and their ratios."""
    content = settings(overrides, dtype, steps)
    tokens = content["training"]["global_batch"] * content["training"]["seq_len"]
    rates: list[tuple[float, float]] = []
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as name:
            ours, our_parameters = native_times(content, Path(name))
            theirs, their_parameters = peer_times(content, Path(name))
        assert our_parameters == their_parameters, "the two models differ"
        rates.append((tokens / steady_median_s(ours), tokens / steady_median_s(theirs)))
    ratios = [ours / theirs for ours, theirs in rates]
    return {
        "dtype": dtype,
        "native_tokens_per_s": median(r[0] for r in rates),
        "transformers_tokens_per_s": median(r[1] for r in rates),
        "ratio": {"median": median(ratios), "min": min(ratios), "max": max(ratios), "n": pairs},
    }


def _environment(content: dict[str, Any]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(content["threads"])}


def main() -> int:
    """Run every shape and dtype, print a table, write benchmarks/results/; 1 when slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| shape | dtype | native tokens/s | transformers tokens/s | ratio (min-max, n) |")
    print("|---|---|---:|---:|---:|")
    for shape, overrides in SHAPES.items():
        for dtype in ("fp32", "bf16"):
            row = {"shape": shape, **compare(overrides, dtype, chosen.pairs, chosen.steps)}
            rows.append(row)
            r = row["ratio"]
            print(
                f"| {shape} | {dtype} | {row['native_tokens_per_s']:,.0f} "
                f"| {row['transformers_tokens_per_s']:,.0f} "
                f"| {r['median']:.3f} ({r['min']:.3f}-{r['max']:.3f}, {r['n']}) |",
                flush=True,
            )
    result = {"benchmark": "trainer_vs_transformers", "cpu": cpu(), "rows": rows}
    write_text(
        HERE / "results" / "trainer_vs_transformers.json", json.dumps(result, indent=2) + "\n"
    )
    return int(any(row["ratio"]["median"] < 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
