"""The activation formula against what autograd really keeps for one block."""

from __future__ import annotations

import math

import pytest

from paceline.core.layout import Layout
from paceline.core.recompute import saved_activations_per_token
from paceline.core.shape import DecoderShape, linear_sizes
from tests.core.shapes import TINY

torch = pytest.importorskip("torch")

TOKENS = 256
WIDE = {"hidden_size": 256, "num_heads": 4, "ffn_size": 1024}
BLOCKS = {
    "gpt": TINY.model_copy(update=WIDE | {"activation": "gelu"}),
    "opt": TINY.model_copy(update=WIDE | {"activation": "relu"}),
    "llama": TINY.model_copy(
        update=WIDE
        | {"num_kv_heads": 2, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm"}
    ),
}


@pytest.mark.parametrize("compute_bytes", [4, 2], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_a_real_block_keeps_at_least_the_bound_and_not_much_more(name: str, compute_bytes: int):
    shape = BLOCKS[name]
    bound = TOKENS * compute_bytes * saved_activations_per_token(shape, Layout())
    kept = kept_bytes(shape, compute_bytes)
    assert bound <= kept < 1.35 * bound


def kept_bytes(shape: DecoderShape, compute_bytes: int) -> int:
    """Bytes of all distinct tensors, weights apart, that the backward pass of one block needs."""
    dtype = torch.float32 if compute_bytes == 4 else torch.bfloat16
    weights = {
        name: torch.randn(out, into, dtype=dtype, requires_grad=True)
        for name, (into, out) in linear_sizes(shape).items()
    }
    weight_storages = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weight_storages:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(TOKENS, shape.hidden_size, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = block(shape, weights, x)
    assert math.isfinite(result.float().sum().item())
    return sum(kept.values())


def block(shape: DecoderShape, weights, x):
    """A pre-norm transformer block over (tokens, hidden), causal, without biases."""
    functional = torch.nn.functional

    def norm(x):
        scale = torch.ones(shape.hidden_size, dtype=x.dtype)
        if shape.norm == "rmsnorm":
            return functional.rms_norm(x, scale.shape, scale)
        return functional.layer_norm(x, scale.shape, scale)

    def heads(x, count: int):
        return x.view(1, TOKENS, count, shape.head_dim).transpose(1, 2)

    y = norm(x)
    mixed = functional.scaled_dot_product_attention(
        heads(y @ weights["q"].t(), shape.num_heads),
        heads(y @ weights["k"].t(), shape.kv_heads),
        heads(y @ weights["v"].t(), shape.kv_heads),
        is_causal=True,
        enable_gqa=shape.kv_heads != shape.num_heads,
    )
    x = x + mixed.transpose(1, 2).reshape(TOKENS, -1) @ weights["o"].t()
    y = norm(x)
    activate = getattr(functional, shape.activation)
    inner = activate(y @ weights["gate" if shape.gated_ffn else "up"].t())
    if shape.gated_ffn:
        inner = inner * (y @ weights["up"].t())
    return x + inner @ weights["down"].t()
