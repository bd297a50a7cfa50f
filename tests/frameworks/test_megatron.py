"""Megatron-Core itself trains a tiny GPT on a CPU by a run's arguments, and its log is read."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.core.run_report import RunReport
from paceline.core.training import RampUp
from paceline.engines.launch.environments import installed
from paceline.files.recipe import load_recipe
from paceline.machines.placement import Request
from paceline.runs import flow
from paceline.runs.plan import make_plan

SMALL = ("model.num_layers=2", "model.hidden_size=64", "model.ffn_size=256", "training.seq_len=32")
RAMP_UP = (4, 4, 4, 4, 8, 8, 12, 12, 16, 16)
CALCULATOR = """
import sys
from megatron.core import num_microbatches_calculator as batch
batch.init_num_microbatches_calculator(0, [32, 32, 2_000_000], 512, 1, 8, False)
for consumed in map(int, sys.argv[1:]):
    batch.update_num_microbatches(consumed, consistency_check=False)
    print(batch.get_current_global_batch_size())
"""
pytestmark = pytest.mark.skipif(
    installed("megatron") is None,
    reason="`paceline recipes engines install megatron` has not been run",
)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunReport]:
    def started(devices: int, *changes: str) -> RunReport:
        overrides = ("engine=megatron", "steps=10", "training.lr=5e-3", *SMALL, *changes)
        request = Request(
            "gpt-1b3-tiny", overrides=overrides, device="cpu", devices=devices, timeout_s=200.0
        )
        report = flow.run(make_plan(request), tmp_path, ["x"], lambda _: None, probe=False)
        assert report.result.status == "ok", report.result.reason
        return report

    return started


def log_of(report: RunReport, rank: int = 0) -> str:
    return (Path(report.folder) / "logs" / f"rank-{rank:05d}.log").read_text()


def test_it_trains_the_model_that_was_planned(run: Callable[..., RunReport]):
    report = run(1, "model.dropout=0")
    log = log_of(report)

    size = re.search(r"model parallel rank \(0, 0\): (\d+)", log)
    assert report.spec and size and int(size[1]) == report.spec.num_parameters
    losses = report.steps["loss"]
    assert losses[-1] < 0.95 * losses[0] < 6.5
    assert tuple(report.steps["global_batch"]) == RAMP_UP
    assert "[after training is done]" in log


def test_tensor_ranks_share_it_and_the_log_tells_of_both(run: Callable[..., RunReport]):
    report = run(2, "layout.tp=2", "training.dtype=bf16")

    assert "tensor-model-parallel size: 2" in log_of(report)
    assert not [w for w in report.result.warnings if "but the plan" in w]
    resident = report.result.metrics["memory_resident_bytes"].value
    assert resident is not None and resident > 50 * 2**20
    assert tuple(report.steps["global_batch"]) == RAMP_UP


def test_embedding_and_head_count_as_layers_where_stages_come_out_even_by_them(
    run: Callable[..., RunReport],
):
    report = run(3, "layout={pp: 3}", "model.num_layers=4", "steps=8")
    sizes = [
        int(size)
        for rank in range(3)
        for size in re.findall(r"model parallel rank \(0, \d\): (\d+)", log_of(report, rank))
    ]
    layer, table = 12 * 64**2 + 13 * 64, 512 * 64
    first, middle, last = sizes
    assert middle == 2 * layer, "two of the four"
    assert table < first - layer < layer and table < last - layer < layer


def test_a_batch_grows_as_megatrons_own_calculator_has_it():
    environment = installed("megatron")
    assert environment is not None
    ramp_up = RampUp(start=32, increment=32, samples=2_000_000)
    assert load_recipe("gpt-1b3", "ramp-up").training.ramp_up == ramp_up
    sizes = ramp_up.sizes(512)
    # Not at the very border, where Megatron divides floating-point numbers.
    at = [at for until, _ in sizes for at in (until - 1, until + 1)]
    done = subprocess.run(
        [environment.python, "-W", "ignore", "-c", CALCULATOR, *map(str, at)],
        capture_output=True,
        text=True,
        check=True,
    )
    grown = [*(batch for _, batch in sizes), 512]
    expected = [batch for pair in pairwise(grown) for batch in pair]
    assert [int(word) for word in done.stdout.split()] == expected
