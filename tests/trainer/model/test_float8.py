"""Products in float8 round as float8 does, and no more."""

from __future__ import annotations

import warnings

import pytest
import torch

from paceline.trainer.config import parse_config
from paceline.trainer.model.decoder import Decoder, LayerSetting, Linear, use_float8
from tests.trainer.example import settings

pytest.importorskip("torchao", reason="float8 needs torchao")

from paceline.trainer.model.float8 import float8_product, float8_settings


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).float().norm() / wanted.float().norm()).item()


def test_a_product_and_its_gradients_are_off_by_what_three_bits_cost() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(32, 96, generator=generator).requires_grad_()
    above = torch.randn(64, 32, generator=generator).bfloat16()

    found = float8_product(x, weight, float8_settings("cpu"))
    gradients = torch.autograd.grad(found, (x, weight), above)

    wide_x, wide_weight = x.detach().float(), weight.detach()
    wanted = wide_x @ wide_weight.t()
    assert found.dtype == torch.bfloat16 and gradients[1].dtype == torch.float32
    # e4m3 has three bits of fraction (a relative error of up to 2^-4), e5m2 two.
    assert 0.005 < error(found, wanted) < 0.06
    assert 0.005 < error(gradients[0], above.float() @ wide_weight) < 0.12
    assert 0.005 < error(gradients[1], above.float().t() @ wide_x) < 0.12


def test_only_the_blocks_matrices_are_narrow() -> None:
    config = parse_config(settings(dtype="fp8"))
    with torch.device("meta"):
        model = Decoder(config.model, LayerSetting(config.training.seq_len, torch.bfloat16))

    use_float8(model, "cpu")

    narrow = {
        name for name, m in model.named_modules() if isinstance(m, Linear) and m.float8 is not None
    }
    assert len(narrow) == 7 * config.model.num_layers
    assert all(name.startswith("blocks.") for name in narrow)


def test_the_compiler_takes_a_product_whole() -> None:
    torch.manual_seed(0)
    layer = Linear(32, 48, bias=True)
    layer.float8 = float8_settings("cpu")
    x = torch.randn(16, 32).bfloat16()
    wanted = layer(x)

    with warnings.catch_warnings():
        # Its tracing of torchao meets what PyTorch has deprecated.
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        found = torch.compile(layer, backend="eager", fullgraph=True)(x)

    assert torch.equal(found, wanted)
