"""What memory needs to know of a resolved run."""

from __future__ import annotations

import pytest

from paceline.core.layout import Layout
from paceline.core.shape import LoraSpec, num_parameters, trainable_parameters
from paceline.core.training import Training
from paceline.engines import engine_names
from paceline.estimate.memory.device_memory import memory
from paceline.estimate.memory.framework import Framework
from paceline.estimate.model.case import Case, cases_of
from paceline.estimate.request import EstimateRequest
from paceline.estimate.run_case import (
    Software,
    case_of,
    cases_of_layouts,
    software_of,
    with_memory,
)
from paceline.files.recipe import load_recipe
from tests.estimate.memory.test_device_memory import LLAMA_8B
from tests.example import SHAPE, make_spec

PLAIN = Framework(weight=2, gradient=4, master=4)


def test_schedule_shards_dtype_and_ends_come_from_the_run():
    layout = Layout(pp=2, schedule="gpipe", zero_stage=2, dp_shard=2, micro_batch=1)
    found = with_memory(LLAMA_8B, make_spec(ranks=8, layout=layout))
    assert (found.schedule, found.dp_shard, found.compute_bytes) == ("gpipe", 2, 4)
    assert (found.vocab, found.tied, found.positions) == (320, False, 0)
    gpt = SHAPE.model_copy(update={"positions": "learned", "tied_embeddings": True})
    spec = make_spec(
        model=gpt, training=Training(seq_len=32, global_batch=8, steps=3, dtype="bf16")
    )
    learned = with_memory(LLAMA_8B, spec)
    assert (learned.tied, learned.positions, learned.compute_bytes) == (True, 64, 2)


def test_adapters_count_with_the_parameters_that_they_have():
    lora = LoraSpec(rank=4, alpha=8, targets=("q", "v"))
    found = with_memory(LLAMA_8B, make_spec(lora=lora))
    assert found.frozen
    assert found.trained_share * num_parameters(SHAPE) == trainable_parameters(SHAPE, lora)


def test_an_mmdits_whole_weights_are_counted():
    shape = load_recipe("flux1-schnell").model
    blocks = Case(
        layers=shape.num_layers,
        hidden=shape.hidden_size,
        ffn=shape.ffn_size,
        heads=shape.num_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=0,
        seq_len=512,
        causal=False,
        peak_16bit=1,
        memory_bytes_per_s=1,
        intra_bytes_per_s=1,
        inter_bytes_per_s=1,
        devices=1,
        global_batch=1,
    )
    case = with_memory(blocks, make_spec(model=shape, ranks=1))
    weights = memory(cases_of([case]), PLAIN).weights[0]
    assert weights == pytest.approx(2 * 2 * num_parameters(shape), rel=0.01)


def test_many_layouts_are_the_cases_of_their_runs():
    spec, machine = (
        EstimateRequest("gpt-1b3", "H100", 16).spec,
        EstimateRequest("gpt-1b3", "H100", 16).machine,
    )
    layouts = [
        Layout(tp=8, pp=2, sequence_parallel=True, zero_stage=1, micro_batch=4),
        Layout(cp=2, cp_exchange="ring", zero_stage=3, dp_shard=4, recompute="full"),
        Layout(zero_stage=2, gradient_sync="last"),
        Layout(pp=4, schedule="zero-bubble", recompute="selective"),
        Layout(pp=4, vp=3),
    ]
    runs = [spec.model_copy(update={"layout": layout}) for layout in layouts]
    each = cases_of([case_of(run, machine, Software()) for run in runs])
    together = cases_of_layouts(spec, machine, Software(), layouts)
    assert together.numbers.keys() == each.numbers.keys()
    for name, column in each.numbers.items():
        assert together.numbers[name].tolist() == column.tolist(), name
    for name, column in each.categories.items():
        assert together.categories[name].tolist() == column.tolist(), name


@pytest.mark.parametrize("engine", [name for name in engine_names() if name != "native"])
def test_a_request_and_a_run_have_the_software_of_the_engine(engine: str) -> None:
    request = EstimateRequest("gpt-1b3", "V100-32GB", 4, overrides=(f"engine={engine}",))
    assert request.resolved_software == software_of(make_spec(engine=engine))


def test_the_software_that_was_requested_takes_precedence() -> None:
    changes = ("engine=megatron_deepspeed",)
    of_engine = EstimateRequest("gpt-1b3", "V100-32GB", 4, overrides=changes)
    explicit = EstimateRequest("gpt-1b3", "V100-32GB", 4, overrides=changes, software="any")
    assert of_engine.resolved_software.implementation == "softmax"
    assert explicit.resolved_software.implementation == "fused"
    assert EstimateRequest("gpt-1b3", "V100-32GB", 4).software_name == "any"
