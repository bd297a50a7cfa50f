"""Products in low precision round as their format does, and no more."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.trainer.config import ConfigError, Fp8Recipe, parse_config
from paceline.trainer.model.decoder import Decoder, LayerSetting
from paceline.trainer.model.layers import Linear
from paceline.trainer.model_config import ModelConfig
from tests.trainer.example import settings, steps, train

pytest.importorskip("torchao", reason="low precision needs torchao")

from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_rht_matrix
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

from paceline.engines.native import GROUPED_RECIPES
from paceline.trainer.model.experts import StackedExperts
from paceline.trainer.model.low_precision import (
    _GROUPED_FACTORIES,
    ROWS_BY_RECIPE,
    SIGNS,
    _check_support,
    low_precision_gemm,
    low_precision_grouped_gemm,
)
from paceline.trainer.replica.assembly import use_low_precision
from tests.trainer import cpu_low_precision
from tests.trainer.cpu_low_precision import (
    cpu_gemm,
    cpu_grouped_gemm,
    hadamard_transform,
    round_to_e2m1,
    round_to_fp8,
    round_to_nvfp4,
)

cpu_low_precision.install()

FP8_RECIPES = get_args(Fp8Recipe)
RECIPES = (*FP8_RECIPES, "mxfp8", "nvfp4")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
ODD = 1e-4 * (torch.arange(8) % 2)
"""Of two that are as near, the even one is taken."""


def asked_for(recipe: str) -> dict[str, str]:
    """The settings of a training in a recipe."""
    return {"dtype": "fp8", "fp8_recipe": recipe} if recipe in FP8_RECIPES else {"dtype": recipe}


def losses_of(folder: Path, **changes: Any) -> NDArray[np.float64]:
    """Loss of every step of a short training."""
    assert train(folder, settings(steps=8, lr=3e-3, **changes)) == 0
    return np.array([line["loss"] for line in steps(folder)])


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).float().norm() / wanted.float().norm()).item()


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """x (128, 256), a weight (384, 256), and a gradient of their product; with a few outliers."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((128, 256), (384, 256), (128, 384))
    x, weight, above = (torch.randn(shape, generator=generator) for shape in shapes)
    x[::16, ::48] *= 30
    return x.bfloat16(), weight.bfloat16(), above.bfloat16()


def product_of(recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """A product, and the gradients of its operands."""
    x, weight, above = operands()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    found = cpu_gemm(recipe)(x, weight)
    of_x, of_weight = torch.autograd.grad(found, (x, weight), above)
    return found, of_x, of_weight


def in_blocks(x: Tensor, rows: int, columns: int, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Every block of rows x columns by itself, as `rounded` gives it back."""
    lines = (
        torch.cat([rounded(block.float()) for block in line.split(columns, 1)], 1)
        for line in x.split(rows, 0)
    )
    return torch.cat([*lines], 0)


def e4m3(block: Tensor, power_of_two: bool) -> Tensor:
    """A block through e4m3, whose largest number is 448, with one scale."""
    scale = 448 / block.abs().max()
    scale = 2 ** scale.log2().floor() if power_of_two else scale
    return (block * scale).to(torch.float8_e4m3fn).float() / scale


def e2m1(block: Tensor, whole: Tensor) -> Tensor:
    """A block through e2m1 with a scale in e4m3 under the whole tensor's: nearest, by search."""
    scale = (block.abs().max() / 6 / whole).to(torch.float8_e4m3fn).float() * whole
    size = (block.abs() / scale).clamp(max=6)
    return E2M1[((size[..., None] - E2M1).abs() + ODD).argmin(-1)] * block.sign() * scale


LINES = {"blockwise": (1, 128), "mxfp8": (1, 32), "nvfp4": (1, 16)}
SQUARES = {"blockwise": (128, 128), "mxfp8": (1, 32), "nvfp4": (16, 16)}


def reference(recipe: str, x: Tensor, block: tuple[int, int]) -> Tensor:
    """x quantised and dequantised block by block."""
    if recipe == "nvfp4":
        return in_blocks(x, *block, partial(e2m1, whole=x.float().abs().max() / (448 * 6)))
    return in_blocks(x, *block, partial(e4m3, power_of_two=recipe == "mxfp8"))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_product_and_its_gradients_are_off_by_what_three_bits_cost(recipe: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 256, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(128, 256, generator=generator).requires_grad_()
    above = torch.randn(128, 128, generator=generator).bfloat16()

    found = cpu_gemm(recipe)(x, weight)
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


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_a_block_scaled_product_is_that_of_quantised_operands(recipe: str) -> None:
    x, weight, above = operands()
    line, square = LINES[recipe], SQUARES[recipe]

    found, of_x, of_weight = product_of(recipe)

    wanted = reference(recipe, x, line) @ reference(recipe, weight, square).t()
    # What is left is the rounding of results to bf16: 2^-9 of each.
    assert error(found, wanted) < 0.002 < error(found, x.float() @ weight.float().t())
    # MX formats quantise a weight once more along what the gradient sums over.
    turned = reference(recipe, weight.t(), square).t()
    assert error(of_x, reference(recipe, above, line) @ turned) < 0.002
    columns = (reference(recipe, operand.t(), line) for operand in (above, x))
    rows, inputs = columns
    assert error(of_weight, rows @ inputs.t()) < 0.002


def test_an_nvfp4_product_is_that_of_quantised_operands_and_gradients_are_right_on_average():
    x, weight, above = operands()
    line, square = LINES["nvfp4"], SQUARES["nvfp4"]

    found, *_ = product_of("nvfp4")
    torch.manual_seed(0)
    gradients = [product_of("nvfp4")[1:] for _ in range(16)]
    of_x, of_weight = (torch.stack(kind).float() for kind in zip(*gradients, strict=True))

    narrow = reference("nvfp4", weight, square)
    assert error(found, reference("nvfp4", x, line) @ narrow.t()) < 0.002
    wanted = above.float() @ narrow
    # A gradient is rounded at random: one is off by what a bit costs, the mean by a quarter of it.
    assert 0.08 < error(of_x[0], wanted) < 0.2
    assert error(of_x.mean(0), wanted) < error(of_x[0], wanted) / 3
    assert 0.08 < error(of_weight[0], above.float().t() @ x.float()) < 0.25


def test_the_cpu_rounding_is_that_of_torchao() -> None:
    x = operands()[0]
    whole = per_tensor_amax_to_scale(x.abs().max())
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole).dequantize(torch.float32)
    assert error(round_to_nvfp4(x.float(), (1, 16)), theirs) < 1e-6
    signs = get_rht_matrix(SIGNS, "cpu", torch.float32, 16)
    turned = (x.float().reshape(-1, 16) @ signs).reshape(x.shape)
    torch.testing.assert_close(hadamard_transform(x.float()), turned)


def test_a_scale_that_is_dropped_is_found() -> None:
    x, weight, _ = operands()
    for recipe, rounded in (("blockwise", round_to_fp8), ("nvfp4", round_to_nvfp4)):
        line, square = LINES[recipe], SQUARES[recipe]
        unscaled = rounded(x.float(), (128, 256)) @ reference(recipe, weight, square).t()
        assert error(unscaled, reference(recipe, x, line) @ weight.float().t()) > 0.01
        own = reference(recipe, x, line)
        assert (
            error(rounded(x.float(), line), own) < 1e-3 < error(rounded(x.float(), (128, 256)), own)
        )


def test_rounding_at_random_keeps_the_mean_and_goes_to_neighbours() -> None:
    torch.manual_seed(0)
    x = torch.linspace(-6, 6, 49)
    drawn = round_to_e2m1(x.expand(4096, -1), stochastic=True)
    assert torch.isin(drawn.abs(), E2M1).all()
    assert (drawn.mean(0) - x).abs().max() < 0.06
    nearest = round_to_e2m1(x, stochastic=False)
    assert ((drawn - x).abs() < 2).all() and ((nearest - x).abs() <= 1).all()


def test_a_row_keeps_its_digits_beside_a_much_larger_one() -> None:
    x, weight = torch.ones(2, 128).bfloat16(), torch.eye(128)
    # Under the larger row's scale the smaller one is below float8's smallest number.
    x[0] = 2.0**-20
    for recipe in ("rowwise", "blockwise", "mxfp8"):
        torch.testing.assert_close(cpu_gemm(recipe)(x, weight), x)
    assert not cpu_gemm("tensorwise")(x, weight)[0].any()


@pytest.mark.parametrize(
    ("recipe", "setting", "instead"),
    [
        ("tensorwise", "fp8_recipe tensorwise", "dtype=bf16"),
        ("rowwise", "fp8_recipe rowwise", "fp8_recipe=tensorwise"),
        ("mxfp8", "dtype mxfp8", "dtype=fp8"),
    ],
)
def test_an_unsupported_gemm_is_rejected_before_training(
    recipe: str, setting: str, instead: str
) -> None:
    def unsupported(x: Tensor, weight: Tensor) -> Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling cublasLt")

    words = rf"training.{setting}: .*\(CUBLAS_STATUS_NOT_SUPPORTED\); use training\.{instead}$"
    with pytest.raises(ConfigError, match=words):
        _check_support(unsupported, "cpu", recipe)


def test_a_cpu_is_rejected() -> None:
    with pytest.raises(ConfigError, match="dtype mxfp8 needs a GPU; on a CPU use"):
        low_precision_gemm("cpu", "mxfp8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device with CUDA may have the kernels")
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "blockwise"])
def test_a_device_without_the_kernels_of_a_format_is_refused(recipe: str) -> None:
    # Meta tensors reach torchao's GPU kernels.
    with pytest.raises(ConfigError, match=rf"{recipe}.* use training|{recipe} needs torchao"):
        low_precision_gemm.__wrapped__("meta", recipe)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device with CUDA may have the kernels")
@pytest.mark.parametrize("recipe", ROWS_BY_RECIPE)
def test_a_device_without_grouped_kernels_is_refused_with_bf16_as_the_remedy(recipe: str) -> None:
    with pytest.raises(ConfigError, match=rf"{recipe}.* use training.dtype=bf16"):
        low_precision_grouped_gemm.__wrapped__("meta", recipe)


@pytest.mark.parametrize("shape", [(4, 32, 128), (128, 128)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_batch_is_multiplied_as_its_rows_are(recipe: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).bfloat16(), torch.randn(256, 128).bfloat16()
    product = cpu_gemm(recipe)
    rows = product(x.reshape(-1, 128), weight)
    assert torch.equal(product(x, weight).reshape(rows.shape), rows)


def test_training_in_low_precision_stays_near_bf16(tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "num_heads": 2, "num_kv_heads": 2, "ffn_size": 128}
    wanted = losses_of(tmp_path / "bf16", dtype="bf16", **wide)
    losses = {r: losses_of(tmp_path / r, **wide, **asked_for(r)) for r in RECIPES}
    off = {name: np.abs(loss / wanted - 1).max() for name, loss in losses.items()}
    assert wanted[-1] < 0.9 * wanted[0]
    assert all(loss[-1] < 0.95 * loss[0] for loss in losses.values())
    assert len({loss.tobytes() for loss in losses.values()}) == len(RECIPES)
    assert 1e-4 < off.pop("nvfp4") < 0.05
    assert all(1e-6 < far < 0.005 for far in off.values())


def test_only_the_blocks_matrices_are_narrow() -> None:
    config = parse_config(settings(dtype="fp8"))
    with torch.device("meta"):
        assert isinstance(config.model, ModelConfig)
        model = Decoder(config.model, LayerSetting(config.training.seq_len, torch.bfloat16))

    use_low_precision(model, "cpu", "tensorwise")

    narrow = {
        name
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module.low_precision is not None
    }
    assert len(narrow) == 7 * config.model.num_layers
    assert all(name.startswith("blocks.") for name in narrow)


@pytest.mark.parametrize("recipe", ROWS_BY_RECIPE)
def test_a_grouped_product_is_that_of_every_expert(recipe: str) -> None:
    """One expert has no rows, and the last rows belong to no expert."""
    rows, _, above = operands()
    weight = torch.randn(3, 384, 256).bfloat16()
    rows, weight = rows.requires_grad_(), weight.requires_grad_()
    ends = torch.tensor([32, 32, 96], dtype=torch.int32)
    gemm = cpu_gemm(recipe)
    wanted = torch.cat([gemm(rows[:32], weight[0]), gemm(rows[32:96], weight[2])])

    found = cpu_grouped_gemm(recipe)(rows, weight, ends)[:96]

    assert torch.equal(found, wanted)
    gradients = [torch.autograd.grad(y, (rows, weight), above[:96]) for y in (found, wanted)]
    (of_rows, of_weight), (wanted_of_rows, wanted_of_weight) = gradients
    assert error(of_rows[:96], wanted_of_rows[:96]) < 1e-3
    assert error(of_weight, wanted_of_weight) < 1e-3
    assert not of_weight[1].any()


@pytest.mark.parametrize("recipe", ROWS_BY_RECIPE)
def test_experts_in_low_precision_train_near_bf16(recipe: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "num_heads": 2, "num_kv_heads": 2, "ffn_size": 128}
    experts = {**wide, "num_experts": 4, "experts_per_token": 2, "routing": "forced"}
    wanted = losses_of(tmp_path / "bf16", dtype="bf16", **experts)

    losses = losses_of(tmp_path / recipe, **experts, **asked_for(recipe))

    assert wanted[-1] < 0.95 * wanted[0]
    assert 1e-6 < np.abs(losses / wanted - 1).max() < 0.005


def test_the_experts_of_all_blocks_are_narrow() -> None:
    """Those of multi-token prediction are among them."""
    config = parse_config(settings(num_experts=4, experts_per_token=2, mtp_layers=1))
    with torch.device("meta"):
        assert isinstance(config.model, ModelConfig)
        model = Decoder(config.model, LayerSetting(config.training.seq_len, torch.bfloat16))

    use_low_precision(model, "cpu", "mxfp8")

    experts = [module for module in model.modules() if isinstance(module, StackedExperts)]
    assert len(experts) == config.model.num_layers + 1
    assert all(e.low_precision is not None and e.group_rows == 32 for e in experts)


def test_recipes_for_experts_are_those_that_torchao_has_grouped_gemms_of() -> None:
    assert set(GROUPED_RECIPES) == set(ROWS_BY_RECIPE) == set(_GROUPED_FACTORIES)
    with pytest.raises(ConfigError, match="fp8_recipe rowwise needs a GPU"):
        low_precision_grouped_gemm("cpu", "rowwise")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_compiler_takes_a_product_whole(recipe: str) -> None:
    torch.manual_seed(0)
    layer = Linear(128, 256, bias=True)
    layer.low_precision = cpu_gemm(recipe)
    x = torch.randn(128, 128).bfloat16()
    wanted = layer(x)

    with warnings.catch_warnings():
        # Its tracing of torchao meets what PyTorch has deprecated.
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        found = torch.compile(layer, backend="eager", fullgraph=True)(x)
        torch.autograd.grad(found.sum(), layer.weight)

    assert torch.equal(found, wanted)
