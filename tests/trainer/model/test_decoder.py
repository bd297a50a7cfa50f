"""The decoder has the parameters that arithmetic says, and computes what it should."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional

from paceline.core.shape import DecoderShape, num_parameters
from paceline.trainer.config import parse_config
from paceline.trainer.model.attention import apply_rotary, rope_tables
from paceline.trainer.model.decoder import (
    Decoder,
    LayerSetting,
    ModelPart,
)
from paceline.trainer.model.layers import Linear, Norm
from paceline.trainer.model.network import count_parameters, init_weights
from paceline.trainer.model_config import ModelConfig
from paceline.trainer.parallel.mesh import Mesh
from tests.core.shapes import GPT_1B3_PADDED, LLAMA_8B, LLAMA_70B, OPT_13B, OPT_350M, TINY
from tests.trainer.example import settings


def model_config(shape: DecoderShape) -> ModelConfig:
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    fields = shape.model_dump(include=known)
    return ModelConfig(**fields, padded_vocab=shape.padded_vocab())


def small(seed: int = 1, **changes: Any) -> Decoder:
    """A decoder's blocks without its head, with their initial weights, in fp64."""
    config = parse_config(settings(**changes))
    setting = LayerSetting(config.training.seq_len, torch.float64)
    blocks = ModelPart(range(config.model.num_layers), last=False)
    model = Decoder(config.model, setting, blocks).double()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    init_weights(model, shapes, seed, Mesh())
    return model


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        (LLAMA_8B, 8_030_261_248),
        (OPT_350M, 331_196_416),
        (OPT_13B, 12_853_473_280),
        (GPT_1B3_PADDED, 1_315_823_616),
        (LLAMA_70B, num_parameters(LLAMA_70B)),
        (TINY, num_parameters(TINY)),
    ],
)
def test_real_shapes_have_their_published_number_of_parameters(
    shape: DecoderShape, count: int
) -> None:
    with torch.device("meta"):
        model = Decoder(model_config(shape), LayerSetting(seq_len=8, dtype=torch.bfloat16))

    assert count_parameters(model) == count == num_parameters(shape)


def test_a_token_sees_no_token_after_it() -> None:
    model = small()
    tokens = torch.randint(320, (1, 32))
    changed = tokens.clone()
    changed[0, 20:] = 7

    before, after = model(tokens), model(changed)

    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_rotary_embeddings_depend_on_the_distance_of_positions_alone() -> None:
    config = parse_config(settings()).model
    cos, sin = rope_tables(config, torch.arange(32))
    q, k = torch.randn(2, 1, 1, 1, config.head_dim, dtype=torch.float64).unbind(0)

    def score(at_q: int, at_k: int) -> float:
        turned_q = apply_rotary(q, cos[at_q], sin[at_q])
        return (turned_q * apply_rotary(k, cos[at_k], sin[at_k])).sum().item()

    assert score(9, 4) == pytest.approx(score(25, 20), rel=1e-12)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-3)
    assert score(3, 3) == pytest.approx((q * k).sum().item(), rel=1e-12)


def test_learned_positions_begin_after_the_unused_rows() -> None:
    model = small(positions="learned", position_offset=2)
    assert model.positions is not None
    tokens = torch.randint(320, (1, 32))
    before = model(tokens)

    with torch.no_grad():
        model.positions.weight[:2] = 100.0

    assert torch.equal(before, model(tokens))


def test_weights_depend_on_seed_and_name_alone() -> None:
    one, deeper = small(num_layers=1), small(num_layers=2)

    same = dict(deeper.named_parameters())
    assert all(torch.equal(p, same[name]) for name, p in one.named_parameters())
    other = dict(small(seed=2).named_parameters())
    assert not torch.equal(same["embedding.weight"], other["embedding.weight"])


def test_initial_weights_have_their_spread() -> None:
    for name, parameter in small(hidden_size=128, bias=True).named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_a_norm_sums_its_gradients_over_many_tokens_in_16_bits_correctly(norm: str) -> None:
    config = parse_config(settings(norm=norm)).model
    x = torch.randn(8192, config.hidden_size)
    above = 0.01 * torch.randn_like(x) + 0.001

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        layer = Norm(config)
        torch.nn.init.ones_(layer.weight)
        if layer.bias is not None:
            torch.nn.init.zeros_(layer.bias)
        layer(x.to(dtype)).backward(above.to(dtype))
        return [p.grad for p in layer.parameters() if p.grad is not None]

    for found, wanted in zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True):
        assert (found - wanted).norm() < 0.01 * wanted.norm()


def test_a_linear_layer_computes_in_the_dtype_of_its_input() -> None:
    layer = Linear(16, 8, bias=True)
    x = torch.randn(4, 16, dtype=torch.bfloat16)

    y = layer(x)
    y.float().sum().backward()

    assert y.dtype == torch.bfloat16
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    assert torch.allclose(
        y.float(), functional.linear(x.float(), layer.weight, layer.bias), atol=0.05
    )
