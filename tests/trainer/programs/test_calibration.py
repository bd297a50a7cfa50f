"""The programs of a calibration print what they measured, once for all ranks."""

from __future__ import annotations

import sys

import pytest

from paceline.core.errors import SystemFaultError
from paceline.machines.probe.program import probe_lines

QUESTION = {
    "device": "cpu", "dtype": "fp32", "seconds": 0.2, "threads": 1,
    "products": [[64, 32, 16]], "attention": [[2, 32, 4, 2, 8]], "payloads": [4096, 65536],
}  # fmt: skip


def test_passes_are_timed_in_both_directions():
    product, attention = probe_lines(sys.executable, "programs.kernels", QUESTION, limit_s=120)
    assert product["event"] == "product" and product["shape"] == [64, 32, 16]
    assert attention["event"] == "attention" and attention["n"] >= 3
    assert (
        min(line[key] for line in (product, attention) for key in ("forward_s", "backward_s")) > 0
    )


def test_two_ranks_measure_together_and_one_prints():
    lines = probe_lines(
        sys.executable, "programs.calibration", QUESTION, ranks=2, threads=1, limit_s=180
    )
    events = [line["event"] for line in lines]
    assert events == [
        "gemm",
        "memory",
        "latency",
        "product",
        "attention",
        "collective",
        "collective",
        "overlap",
    ]
    assert {line["ranks"] for line in lines} == {2} and {line["threads"] for line in lines} == {1}
    assert 0 <= lines[-1]["exposed"] <= 1
    assert [line["bytes"] for line in lines[5:7]] == [4096, 65536]


def test_a_training_that_cannot_run_says_why(tmp_path):
    path = tmp_path / "cases.json"
    path.write_text('{"cases": [{"name": "x", "settings": {"schema": 99}, "steps": 2}]}')
    with pytest.raises(SystemFaultError, match="is not supported; this trainer reads schema 2"):
        probe_lines(sys.executable, "programs.step_times", {"file": str(path)}, limit_s=60)
