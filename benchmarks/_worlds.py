"""Worlds of processes in which a benchmark's own program runs, and settings for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.core.hardware import Cluster
from paceline.engines import native
from paceline.files.recipe import load_recipe, resolve

HERE = Path(__file__).parent


def settings(ranks: int, *overrides: str, threads: int = 1) -> dict[str, Any]:
    """Return trainer.json of tiny-llama on `ranks` CPU processes, with synthetic data."""
    recipe = load_recipe("tiny-llama", None, ["data.source=synthetic", *overrides])
    cluster = Cluster(name="here", device="cpu", devices_per_node=ranks, threads_per_device=threads)
    spec = resolve(recipe, cluster, True, None)
    problems = native.unsupported(spec)
    assert not problems, problems
    return native.settings(spec)


def start(program: str, ranks: int, question: Any, folder: Path, threads: int = 1) -> list[Any]:
    """Return the answers of the ranks of a new world: `program QUESTION.json ANSWER.json` per rank.

    A rank finds its answer's name with its rank put before it. Raises RuntimeError with what the
    world printed when it fails.
    """
    question_file, answer = folder / "question.json", folder / "answer.json"
    question_file.write_text(json.dumps(question))
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={ranks}",
            str(HERE / program),
            str(question_file),
            str(answer),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    if result.returncode:
        raise RuntimeError(f"{program} on {ranks} ranks failed:\n{result.stderr[-3000:]}")
    return [json.loads(answer_of(answer, rank).read_text()) for rank in range(ranks)]


def answer_of(answer: Path, rank: int) -> Path:
    """The file of one rank's answer."""
    return answer.with_name(f"{rank}-{answer.name}")
