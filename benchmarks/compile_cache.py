"""Cost of compiling for a run, with an empty cache and with that of the previous run.

    python benchmarks/compile_cache.py [--pairs 1]

Three runs of `paceline run` in turn, one process on all cores, 6 steps each: blocks uncompiled,
compiled with an empty cache, compiled with what that left behind. The figures are processor seconds
of everything that a run starts, which other programs disturb least; what compiling costs is the
difference to the uncompiled run of the same turn, and takes in importing the compiler.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _result import Surroundings, keep, spread_of, spread_text

from paceline.engines.native import COMPILE_CACHE

RECIPES = (
    "tiny-llama",
    "tiny-gpt",
    "opt-350m-sft-tiny",
    "llama2-70b-lora-tiny",
    "flux1-schnell-tiny",
)
STEPS = 6


def processor_s(recipe: str, compiled: str, folder: Path) -> float:
    """User and system seconds of one run and all that it starts."""
    before = os.times()
    result = subprocess.run(
        [
            *(sys.executable, "-m", "paceline", "run", recipe, "--devices", "1", "--force"),
            *("--runs-dir", str(folder / "runs"), "--set", f"steps={STEPS}"),
            *("--set", f"training.compile={compiled}"),
        ],
        env={**os.environ, COMPILE_CACHE: str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    if f"{STEPS} of {STEPS} steps" not in result.stdout and result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    after = os.times()
    used = zip(after[2:4], before[2:4], strict=True)
    return sum(now - then for now, then in used)


def turn(recipe: str) -> dict[str, float]:
    """Processor seconds of the three runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = processor_s(recipe, "none", folder)
        cold, warm = (processor_s(recipe, "blocks", folder) - plain for _ in range(2))
    return {"run": plain, "cold": cold, "warm": warm, "ratio": warm / cold}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=1)
    pairs: int = parser.parse_args().pairs
    around, rows = Surroundings(), []
    for recipe in RECIPES:
        turns = [turn(recipe) for _ in range(pairs)]
        row = {key: spread_of([one[key] for one in turns]) for key in turns[0]}
        rows.append({"recipe": recipe, **row})
        cold, warm, ratio = (spread_text(row[key], 2) for key in ("cold", "warm", "ratio"))
        print(f"{recipe}: compiling {cold} s, with the cache {warm} s: {ratio}", flush=True)
    keep("compile_cache", "processor seconds", around, steps=STEPS, rows=rows)


if __name__ == "__main__":
    main()
