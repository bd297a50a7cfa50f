"""Other programs train a tiny model with experts for real, and their figures are right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.core.layout import Layout
from paceline.core.training import Training
from paceline.engines import engine
from paceline.report.run_document import run_headline
from paceline.runs import flow
from paceline.runs.plan import Plan
from tests.example import SHAPE, make_spec

STEPS, SEQ_LEN, BATCH, EXPERTS, ACTIVE = 10, 32, 4, 4, 2
MIXTRAL = SHAPE.model_copy(update={"num_experts": EXPERTS, "experts_per_token": ACTIVE})
QWEN3 = MIXTRAL.model_copy(update={"qk_norm": True, "head_size": 16})


def flops_per_token(shape: Any) -> float:
    """Counted by hand: 6 for each weight of a GEMM that a token meets, and causal attention."""
    queries = shape.num_heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * queries + 2 * keys)
    experts = ACTIVE * 3 * shape.hidden_size * shape.ffn_size + shape.hidden_size * EXPERTS
    head = shape.hidden_size * shape.vocab_size
    scores = 6 * shape.num_layers * queries * SEQ_LEN
    return 6 * (shape.num_layers * (attention + experts) + head) + scores


CASES: Mapping[str, tuple[str, Any, str, int, dict[str, int]]] = {
    "transformers Mixtral": ("hf_trainer", MIXTRAL, "learned", 1, {}),
    "transformers Qwen3-MoE": ("hf_trainer", QWEN3, "learned", 2, {}),
    "Megatron-Core": ("megatron", QWEN3, "learned", 1, {}),
    "Megatron-Core, forced, expert-parallel": ("megatron", MIXTRAL, "forced", 2, {"ep": 2}),
    "torchtitan": ("torchtitan", MIXTRAL, "learned", 1, {}),
    "torchtitan, forced, sharded": ("torchtitan", QWEN3, "forced", 2, {"zero_stage": 3}),
}


BY_DAY = (
    "transformers Qwen3-MoE",
    "Megatron-Core, forced, expert-parallel",
    "torchtitan, forced, sharded",
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in BY_DAY else pytest.mark.nightly) for case in CASES],
)
def test_a_model_with_experts_trains_and_its_figures_are_right(case: str, tmp_path: Path):
    name, shape, routing, ranks, sizes = CASES[case]
    training = Training(
        seq_len=SEQ_LEN,
        global_batch=BATCH * ranks,
        steps=STEPS,
        dtype="fp32",
        lr=5e-3,
        routing=routing,  # type: ignore[arg-type]
    )
    layout = Layout(micro_batch=BATCH, **sizes)  # type: ignore[arg-type]
    spec = make_spec(
        ranks, engine=name, model=shape, training=training, layout=layout, time_limit_s=400.0
    )
    starter = engine(name)
    if missing := starter.missing(spec):
        pytest.skip(missing)
    assert starter.unsupported(spec) == []

    report = flow.run(Plan(spec, starter.job(spec, "x"), {}), tmp_path, ["x"], ignore, probe=False)

    result = report.result
    assert result.status == "ok", result.reason
    assert result.steps_done == STEPS
    step_s, rate, flops = (
        result.metrics[metric].value
        for metric in ("step_time_s", "tokens_per_s", "model_flops_per_s_per_device")
    )
    assert step_s and rate and rate == pytest.approx(SEQ_LEN * BATCH * ranks / step_s)
    assert flops == pytest.approx(flops_per_token(shape) * rate / ranks)
    losses = report.steps["loss"]
    assert losses[-1] < losses[0]
    assert report.facts.routing == ("forced" if routing == "forced" else "learned from scratch")
    assert run_headline(report).endswith(f"routing {report.facts.routing}")
    if name == "megatron" and not sizes:
        # The programs of the other engines refuse a model of another size.
        log = (Path(report.folder) / "logs" / "rank-00000.log").read_text()
        size = re.search(r"model parallel rank \(0, 0\): (\d+)", log)
        assert size and int(size[1]) == spec.num_parameters


def ignore(_: object) -> None:
    """Progress is not of interest."""
