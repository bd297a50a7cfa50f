"""The benchmark that does a step's products alone knows all of them, and takes its turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.trainer import example

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COUNT = (
    "import json; from _step_products_in_turns import products_of\n"
    "calls = products_of('trainer.json'); [call() for call in calls]\n"
    "print(json.dumps([len(calls), len(set(map(id, calls)))]))"
)
"""Every product is done again once; equal ones are one object."""
OF_A_BLOCK, OF_THE_HEAD = 7, 1
"""Linear layers of a Llama: queries, keys, values, output, gate, up, down; and the head."""


def prepared(folder: Path) -> Path:
    (folder / "steps").mkdir(parents=True)
    (folder / "trainer.json").write_text(json.dumps(example.settings(steps=3)))
    return folder


def test_each_linear_layer_has_its_three_products_and_attention_its_own(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "run")
    raw = json.loads((folder / "trainer.json").read_text())
    done = subprocess.run(
        [sys.executable, "-c", COUNT],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    products, different = json.loads(done.stdout.splitlines()[-1])
    linear = OF_A_BLOCK * raw["model"]["num_layers"] + OF_THE_HEAD
    assert products > 3 * linear * raw["num_microbatches"]
    assert 3 < different < products


def test_it_tells_the_time_of_a_block_for_each_that_is_asked_for(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "run")
    program = str(BENCHMARKS / "_step_products_in_turns.py")
    done = subprocess.run(
        [sys.executable, program, "trainer.json", "2"],
        cwd=folder, input="\n\n\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    blocks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(blocks) == 3 and all(wall > 0 and cpu > 0 for wall, cpu in blocks)
