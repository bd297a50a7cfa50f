"""DeepSpeed itself trains the tiny variants of two published models, in two processes on a CPU."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.run_report import RunReport
from paceline.engines.launch.environments import installed
from paceline.machines.placement import Request
from paceline.runs import flow
from paceline.runs.plan import make_plan

TOKENIZED = """
import sys
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import OPTConfig, OPTForCausalLM
folder, text = Path(sys.argv[1]), sys.argv[2]
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train_from_iterator(
    [text], trainers.BpeTrainer(vocab_size=512, special_tokens=["</s>"], initial_alphabet=alphabet))
tokenizer.save(str(folder / "tokenizer.json"))
OPTForCausalLM(OPTConfig.from_pretrained(folder)).save_pretrained(folder)
"""
TWO_RANKS = {"device": "cpu", "devices": 2}


@pytest.fixture
def python() -> Path:
    environment = installed("deepspeed_chat")
    if environment is None:
        pytest.skip(
            "no environment of deepspeed_chat: paceline recipes engines install deepspeed_chat"
        )
    return environment.python


@pytest.fixture
def run(tmp_path: Path, python: Path) -> Callable[..., RunReport]:
    def started(recipe: str, *changes: str) -> RunReport:
        short = ("training.steps=6", "training.lr_schedule.warmup=3", "training.lr=3e-3")
        overrides = ("engine=deepspeed_chat", *short, *changes)
        plan = make_plan(Request(recipe, overrides=overrides, timeout_s=300.0, **TWO_RANKS))
        return flow.run(plan, tmp_path / "runs", ["x"], lambda _: None, probe=False)

    return started


def said(report: RunReport, pattern: str) -> tuple[float, ...]:
    """The numbers that the first rank's log prints so."""
    log = (Path(report.folder) / "logs" / "rank-00000.log").read_text()
    match = re.search(pattern, log)
    assert match is not None, log[-3000:]
    return tuple(map(float, match.groups()))


def test_the_tiny_opt_trains_and_its_figure_is_the_official_one(run: Callable[..., RunReport]):
    report = run("opt-350m-sft-tiny")
    assert report.result.status == "ok", report.result.reason
    (throughput,) = said(report, r"Throughput: (\d+\.\d+) samples/sec")
    seconds, steps = said(report, r"Execution time: (\d+\.\d+) seconds for (\d+) steps")
    assert report.result.metrics["samples_per_s"].value == pytest.approx(throughput)
    assert throughput == pytest.approx(16 * steps / seconds, rel=1e-3) and steps == 6
    first, last = said(report, r"loss: (\d+\.\d+) at first, (\d+\.\d+) at last")
    assert last < first
    assert report.spec is not None
    assert said(report, r"model parameters: (\d+)") == (report.spec.num_parameters,)
    assert [*report.steps.index] == [*range(3, 10)]


def test_adapters_recomputation_and_zero_3_train_a_stored_model_on_stored_pairs(
    run: Callable[..., RunReport], python: Path, tmp_path: Path
):
    model, data = tmp_path / "opt", tmp_path / "pairs.jsonl"
    model.mkdir()
    plan = make_plan(Request("opt-13b-sft-tiny", overrides=("engine=deepspeed_chat",), **TWO_RANKS))
    (model / "config.json").write_text(plan.job.files["model/config.json"])
    lines = [{"prompt": f"Human: {n}? Assistant:", "chosen": f" {n} it is."} for n in range(200)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    subprocess.run([python, "-c", TOKENIZED, model, data.read_text()], check=True, timeout=120)
    report = run(
        "opt-13b-sft-tiny",
        "layout.zero_stage=3",
        f"engine_settings.model={model}",
        f"engine_settings.data={data}",
        "engine_settings.launcher=deepspeed",
    )
    assert report.result.status == "ok", report.result.reason
    first, last = said(report, r"loss: (\d+\.\d+) at first, (\d+\.\d+) at last")
    assert last < first
    assert report.spec is not None
    assert said(report, r"model parameters: (\d+)") == (report.spec.num_parameters,)
    three_rates = said(report, r"step=9, skipped=0, lr=\[([^,]+), ([^,]+), ([^,]+)\]")
    assert three_rates[0] == three_rates[1] == three_rates[2]
    assert not [warning for warning in report.result.warnings if "but the plan" in warning]


def test_data_that_fills_no_step_ends_the_run_with_the_reason(
    run: Callable[..., RunReport], tmp_path: Path
):
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "a", "chosen": "b"}\n')
    report = run("opt-350m-sft-tiny", f"engine_settings.data={data}")
    assert report.result.status == "failed"
    reason = report.result.reason or ""
    assert "has 1 samples" in reason and "one step needs 16" in reason
