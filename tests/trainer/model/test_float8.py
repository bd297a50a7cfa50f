"""Products in float8 round as float8 does, and no more."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.trainer.config import FP8_RECIPES, ConfigError, parse_config
from paceline.trainer.model.decoder import Decoder, LayerSetting
from paceline.trainer.model.float8_layers import use_float8
from paceline.trainer.model.layers import Linear
from tests.trainer.example import settings, steps, train

pytest.importorskip("torchao", reason="float8 needs torchao")

from torchao.float8.float8_training_tensor import Float8TrainingTensor

from paceline.trainer.model.float8 import float8_product, float8_settings


def losses_of(folder: Path, **changes: Any) -> NDArray[np.float64]:
    """Loss of every step of a short training."""
    assert train(folder, settings(steps=8, lr=3e-3, **changes)) == 0
    return np.array([line["loss"] for line in steps(folder)])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).float().norm() / wanted.float().norm()).item()


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_product_and_its_gradients_are_off_by_what_three_bits_cost(recipe: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(32, 96, generator=generator).requires_grad_()
    above = torch.randn(64, 32, generator=generator).bfloat16()

    found = float8_product(x, weight, float8_settings("cpu", recipe))
    gradients = torch.autograd.grad(found, (x, weight), above)

    wide_x, wide_weight = x.detach().float(), weight.detach()
    wanted = wide_x @ wide_weight.t()
    assert found.dtype == torch.bfloat16 and gradients[1].dtype == torch.float32
    # e4m3 has three bits of fraction (a relative error of up to 2^-4), e5m2 two.
    above_off = 0.12 if recipe == "tensorwise" else 0.06
    assert 0.005 < error(found, wanted) < 0.06
    assert 0.005 < error(gradients[0], above.float() @ wide_weight) < above_off
    weight_error = error(gradients[1], above.float().t() @ wide_x)
    if recipe == "rowwise_with_gw_hp":
        assert weight_error < 0.005
    else:
        assert 0.005 < weight_error < above_off


def test_a_row_keeps_its_digits_beside_a_much_larger_one() -> None:
    x, weight = torch.ones(2, 16).bfloat16(), torch.eye(16)
    # Under the larger row's scale the smaller one is below float8's smallest number.
    x[0] = 2.0**-20
    assert torch.equal(float8_product(x, weight, float8_settings("cpu", "rowwise")), x)
    assert not float8_product(x, weight, float8_settings("cpu", "tensorwise"))[0].any()


@pytest.mark.parametrize(
    ("recipe", "instead"), [("tensorwise", "dtype=bf16"), ("rowwise", "fp8_recipe=tensorwise")]
)
def test_products_that_a_device_lacks_are_refused_before_training(
    recipe: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling cublasLt")

    monkeypatch.setattr(Float8TrainingTensor, "__torch_dispatch__", lacking)
    words = rf"fp8_recipe {recipe}: .*\(CUBLAS_STATUS_NOT_SUPPORTED\); use training\.{instead}$"
    with pytest.raises(ConfigError, match=words):
        float8_settings.__wrapped__("cpu", recipe)


def test_training_in_float8_stays_near_bf16(tmp_path: Path) -> None:
    wanted = losses_of(tmp_path / "bf16", dtype="bf16")
    losses = {r: losses_of(tmp_path / r, dtype="fp8", fp8_recipe=r) for r in FP8_RECIPES}
    off = {name: np.abs(loss / wanted - 1).max() for name, loss in losses.items()}
    assert wanted[-1] < 0.9 * wanted[0]
    assert len(set(off.values())) == len(FP8_RECIPES)
    assert all(1e-6 < far < 0.005 for far in off.values())


def test_only_the_blocks_matrices_are_narrow() -> None:
    config = parse_config(settings(dtype="fp8"))
    with torch.device("meta"):
        model = Decoder(config.model, LayerSetting(config.training.seq_len, torch.bfloat16))

    use_float8(model, "cpu", "tensorwise")

    narrow = {
        name for name, m in model.named_modules() if isinstance(m, Linear) and m.float8 is not None
    }
    assert len(narrow) == 7 * config.model.num_layers
    assert all(name.startswith("blocks.") for name in narrow)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_the_compiler_takes_a_product_whole(recipe: str) -> None:
    torch.manual_seed(0)
    layer = Linear(32, 48, bias=True)
    layer.float8 = float8_settings("cpu", recipe)
    x = torch.randn(16, 32).bfloat16()
    wanted = layer(x)

    with warnings.catch_warnings():
        # Its tracing of torchao meets what PyTorch has deprecated.
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        found = torch.compile(layer, backend="eager", fullgraph=True)(x)

    assert torch.equal(found, wanted)
