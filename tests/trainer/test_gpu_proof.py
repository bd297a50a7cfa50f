"""The proof for a GPU goes the same way on a CPU, so that it still works when a GPU is at hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROOF = Path(__file__).parents[2] / "benchmarks" / "gpu_proof.py"


@pytest.mark.nightly
def test_both_sides_of_a_case_are_trained_on_a_cpu() -> None:
    command = [sys.executable, str(PROOF), "--device", "cpu", "--only", "OPT", "products"]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "best GEMM, TFLOP/s: fp32" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("| OPT-350M SFT at 512")]
    assert [row.split("|")[1].strip().split("(")[1] for row in rows] == ["native)", "transformers)"]
