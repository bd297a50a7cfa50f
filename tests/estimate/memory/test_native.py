"""The memory model compared with the native trainer's own tracker on this machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.core.layout import Layout
from paceline.core.training import Training
from paceline.engines import native
from paceline.estimate.memory.device_memory import rank_memory
from paceline.estimate.memory.framework import NATIVE_CPU
from paceline.estimate.model.case import Case, cases_of
from paceline.estimate.run_case import with_memory
from tests.example import SHAPE, make_spec
from tests.trainer.example import command

SHAPE_HERE = SHAPE.model_copy(
    update={"num_layers": 4, "hidden_size": 128, "ffn_size": 384, "max_positions": 128}
)
DRIVER = Path(__file__).parents[2] / "trainer" / "memory_driver.py"
LIMIT_S = 240
RANKS = 2
LAYOUTS = {
    "fsdp": Layout(micro_batch=4, zero_stage=2),
    "tensor": Layout(micro_batch=4, tp=2, sequence_parallel=True),
    "stream": Layout(micro_batch=4, zero_stage=2),
    "probabilities": Layout(micro_batch=4, tp=2, sequence_parallel=True),
}
DROPPED = {"stream": {"dropout": 0.1, "attention_dropout": 0.0}, "probabilities": {"dropout": 0.1}}


def spec(name: str) -> Any:
    training = Training(seq_len=128, global_batch=8, steps=3, dtype="bf16")
    shape = SHAPE_HERE.model_copy(update=DROPPED.get(name, {}))
    return make_spec(ranks=RANKS, model=shape, training=training, layout=LAYOUTS[name])


def case(name: str) -> Case:
    layout = LAYOUTS[name]
    plain = Case(
        layers=4,
        hidden=128,
        ffn=384,
        heads=4,
        kv_heads=2,
        head_dim=32,
        vocab=320,
        gated=True,
        seq_len=128,
        peak_16bit=1,
        memory_bytes_per_s=1,
        intra_bytes_per_s=1,
        inter_bytes_per_s=1,
        devices=RANKS,
        global_batch=8,
        tp=layout.tp,
        micro_batch=4,
        zero_stage=layout.zero_stage,
        sequence_parallel=layout.sequence_parallel,
        generation="cpu",
    )
    return with_memory(plain, spec(name))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The memory that the first of two ranks reports for every layout."""
    runs = {name: {**native.settings(spec(name)), "threads": 1} for name in LAYOUTS}
    for run in runs.values():
        run["data"]["source"] = "synthetic"
    folder = tmp_path_factory.mktemp("estimated")
    (folder / "cases.json").write_text(json.dumps(runs))
    call = command(RANKS, str(DRIVER), str(folder / "cases.json"), str(folder))
    done = subprocess.run(call, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "rank-0.json").read_text())


@pytest.mark.parametrize("name", LAYOUTS)
def test_states_are_met_within_half_a_percent_and_the_peak_within_five(
    told: dict[str, dict[str, Any]], name: str
):
    record = told[name]["record"]
    found = rank_memory(cases_of([case(name)]), 0, NATIVE_CPU)
    for part in ("weights", "gradients", "optimizer"):
        measured = record["parts_bytes"][part]
        assert getattr(found, part)[0] == pytest.approx(measured, rel=0.005), part
    assert found.allocated[0] == pytest.approx(record["peak_bytes"]["tracked"], rel=0.05)


def test_a_gate_that_is_left_out_would_be_found(told: dict[str, dict[str, Any]]):
    wrong = cases_of([case("fsdp")]).with_numbers(gated=0)
    peak = rank_memory(wrong, 0, NATIVE_CPU).allocated[0]
    assert peak != pytest.approx(told["fsdp"]["record"]["peak_bytes"]["tracked"], rel=0.05)
