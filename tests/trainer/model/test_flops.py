"""The catalog's FLOPs are those that PyTorch counts in the trainer's own model, to the last one.

On the meta device attention is computed by matrix products over the whole square, which is what the
full-attention convention counts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.core.flops import FlopsInput, hardware_flops_per_token, model_flops_per_token
from paceline.core.layout import Recompute
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape, LoraSpec
from paceline.engines import native
from paceline.trainer.config import parse_config
from tests.trainer.test_workloads import TINY, resolved, whole_model

SAMPLES = 2
DECODERS = [name for name in TINY if resolved(name).model.kind == "decoder"]


def counted(spec: RunSpec, recompute: Recompute) -> int:
    """FLOPs of a forward and a backward pass of SAMPLES samples."""
    config = parse_config(native.settings(spec))
    model = whole_model(replace(config, layout=replace(config.layout, recompute=recompute)))
    model.make_tables(torch.device("meta"))
    tokens = torch.zeros(SAMPLES, spec.training.seq_len, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    return counter.get_total_flops()


def promised(spec: RunSpec, recompute: Recompute) -> float:
    """What the formulas say of the same, with every query attending to every key."""
    x = FlopsInput(spec.model, spec.training.seq_len, recompute, spec.lora)
    per_token = model_flops_per_token if recompute == "none" else hardware_flops_per_token
    return SAMPLES * spec.training.seq_len * per_token("full-attention", x)


def before_the_first_adapter(shape: DecoderShape, lora: LoraSpec | None) -> int:
    """FLOPs per token of gradients that nothing needs: those of the first block's input.

    Where the embedding is frozen, no gradient flows below the first block's q, k and v.
    """
    if lora is None or lora.train_rest:
        return 0
    widths = shape.attention_size + 2 * shape.kv_size
    return 2 * shape.hidden_size * (widths + 3 * lora.rank)


def not_done_again(shape: DecoderShape, lora: LoraSpec | None) -> int:
    """FLOPs per token that recomputing a block saves: it ends with the last tensor that is needed.

    That is the input of the block's last product, or, behind it, the input of a norm.
    """
    if shape.norm_position == "post":
        return 0
    last = lora.rank * shape.hidden_size if lora and "down" in lora.targets else 0
    return shape.num_layers * 2 * (last or shape.ffn_size * shape.hidden_size)


@pytest.mark.parametrize("name", DECODERS)
def test_the_formula_is_what_the_model_does(name: str) -> None:
    spec = resolved(name)
    assert spec.model.kind == "decoder"
    tokens = SAMPLES * spec.training.seq_len
    unneeded = tokens * before_the_first_adapter(spec.model, spec.lora)

    assert counted(spec, "none") == promised(spec, "none") - unneeded
    assert unneeded < 0.02 * promised(spec, "none")


@pytest.mark.parametrize("name", DECODERS)
def test_full_recomputation_is_counted_but_for_what_ends_a_block(name: str) -> None:
    spec = resolved(name)
    assert spec.model.kind == "decoder"
    tokens = SAMPLES * spec.training.seq_len
    unneeded = before_the_first_adapter(spec.model, spec.lora)
    unneeded += not_done_again(spec.model, spec.lora)

    assert counted(spec, "full") == promised(spec, "full") - tokens * unneeded


@pytest.mark.parametrize("name", DECODERS)
def test_recomputing_attention_is_counted_but_for_its_second_product(name: str) -> None:
    spec = resolved(name)
    assert spec.model.kind == "decoder"
    shape, tokens = spec.model, SAMPLES * spec.training.seq_len
    second = 2 * shape.num_layers * shape.attention_size * spec.training.seq_len
    unneeded = tokens * (before_the_first_adapter(shape, spec.lora) + second)

    assert counted(spec, "selective") == promised(spec, "selective") - unneeded
