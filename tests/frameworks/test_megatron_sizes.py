"""Megatron-Core builds a tiny DeepSeek of the engine's arguments, as large as the shape counts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.core.shape import DecoderShape, num_parameters
from paceline.engines.launch.environments import installed
from paceline.engines.megatron import lm_arguments
from paceline.engines.megatron.arguments import words
from tests.example import make_spec

TINY = DecoderShape.model_validate(
    {
        "num_layers": 3,
        "hidden_size": 32,
        "num_heads": 4,
        "ffn_size": 16,
        "num_experts": 4,
        "experts_per_token": 2,
        "shared_ffn_size": 24,
        "first_dense_layers": 1,
        "dense_ffn_size": 48,
        "mtp_layers": 1,
        "latent_attention": {
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
        "vocab_size": 128,
        "gated_ffn": True,
        "activation": "silu",
        "norm": "rmsnorm",
        "positions": "rope",
        "bias": False,
        "tied_embeddings": False,
    }
)
PROGRAM = Path(__file__).with_name("megatron_sizes_program.py")
pytestmark = pytest.mark.skipif(
    installed("megatron") is None,
    reason="`paceline recipes engines install megatron` has not been run",
)


def test_a_tiny_deepseek_is_as_large_as_it_is_counted():
    environment = installed("megatron")
    assert environment is not None
    spec = make_spec(engine="megatron", model=TINY)
    told = words(lm_arguments.arguments(spec))
    size = ["--padded-vocab-size", str(TINY.vocab_size)]
    done = subprocess.run(
        [environment.python, "-W", "ignore", str(PROGRAM), *told, *size],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["parameters", str(num_parameters(TINY))]
