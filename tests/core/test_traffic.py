"""Bytes by axis: the parameters of whole models, and what the step model counts."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.axes.weights import block_weights, end_weights
from paceline.core.layout import Layout
from paceline.core.parallel_run import ParallelRun
from paceline.core.run import RunSpec
from paceline.core.shape import LoraSpec, num_parameters
from paceline.core.traffic import LINK_SHARE, step_traffic, unsupported_reason
from paceline.core.training import Training
from tests.example import SHAPE, make_spec

GPT = {"bias": True, "norm": "layernorm", "positions": "learned", "tied_embeddings": True,
       "gated_ffn": False, "activation": "gelu"}  # fmt: skip
RANKS, STEPS = 2, 2


def spec_of(layout: dict[str, Any], shape: dict[str, Any], ranks: int = RANKS) -> RunSpec:
    """One micro-batch or more of two samples."""
    return make_spec(
        ranks=ranks,
        model=SHAPE.model_copy(update=shape),
        layout=Layout(micro_batch=2, **layout),
        training=Training(seq_len=32, global_batch=8, steps=STEPS, dtype="bf16"),
        memory_parts=False,
    )


EXPERTS = {"num_experts": 4, "experts_per_token": 2}
BOTH = {"norm_position": "both", "qk_norm": True}


@pytest.mark.parametrize(
    "shape", [{}, GPT, {"norm": "layernorm", "embedding_size": 16} | GPT, BOTH, GPT | BOTH, EXPERTS]
)
def test_weights_of_a_whole_model_are_its_parameters(shape: dict[str, Any]) -> None:
    x = spec_of({}, shape).parallel
    weights = x.layers * sum(weight.size for weight in block_weights(x))
    weights += sum(weight.size for weight in end_weights(x))
    assert weights == num_parameters(x.shape)


def test_the_tensor_axis_moves_what_the_step_model_counts() -> None:
    """Two sums of t h numbers forward and two backward a block, as `_tp` of the step model."""
    x = spec_of({"tp": 2}, {}).parallel
    blocks = sum(t.num_bytes for t in step_traffic(x) if t.purpose == "activations")
    ends = 2 * x.tokens * x.shape.hidden_size * x.compute_bytes
    per_block = 4 * x.tokens * x.shape.hidden_size * 2
    assert blocks == x.num_microbatches * (x.layers * per_block + ends)
    assert LINK_SHARE["all_reduce"](4) == 1.5


@pytest.mark.parametrize(
    ("layout", "lora", "says"),
    [
        (Layout(zero_stage=3, pp=2), None, "in a pipeline"),
        (Layout(zero_stage=2, tp=2), None, "with tensor parallelism"),
        (Layout(), LoraSpec(rank=4, alpha=8, targets=("q",)), "adapters"),
        (Layout(tp=4, cp=2, cp_exchange="all-to-all"), None, "copies of key/value heads"),
        (Layout(), None, None),
    ],
)
def test_what_has_no_formula_says_so(
    layout: Layout, lora: LoraSpec | None, says: str | None
) -> None:
    reason = unsupported_reason(ParallelRun(layout, SHAPE, 2 * layout.model_devices, lora=lora))
    assert reason is None if says is None else says in (reason or "")
