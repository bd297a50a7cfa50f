"""Matrix products in 8 and 4 bits by torchao; a recipe says what shares a scale.

`tensorwise`: each operand has a scale from its largest value (e4m3 forward, e5m2 for gradients).
`rowwise`: each row along the summed dimension has one, a power of two (e4m3 throughout).
`rowwise_with_gw_hp`: the same, but the weight's tensorwise for the input's gradient, and the
weight's gradient is computed in the compute dtype.
`blockwise`: 128 numbers of a row have one, of weights a block of 128 x 128 (e4m3 throughout).
`mxfp8`: 32 numbers along the summed dimension have one, a power of two (e4m3 throughout).
`nvfp4`: 16 such numbers, of weights a block of 16 x 16, have one in e4m3, the tensor another.

Results are in the compute dtype. Over a tensor-parallel axis the scales are each rank's own. No CPU
multiplies so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from paceline.trainer.config import NARROW, ConfigError

Product = Callable[[Tensor, Tensor], Tensor]
"""(..., in) x (out, in) -> (..., out), differentiable, in the first one's dtype."""
CPU_PRODUCTS: dict[str, Callable[[str], Product]] = {}
"""By recipe, for tests that compute what a GPU would; empty in a training."""
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs of the Hadamard transform, once drawn: any do, and replicas must share them."""


@cache
def low_precision_product(device_type: str, recipe: str) -> Product:
    """How a device multiplies by a recipe.

    To be asked for before anything is compiled, because the compiler would follow the imports.
    Raises ConfigError without torchao, and where the device or its PyTorch lacks the products.
    """
    makers = CPU_PRODUCTS if device_type == "cpu" else _MAKERS
    if recipe not in makers:
        raise ConfigError(f"{_named(recipe)} needs a GPU; on a CPU use training.dtype=bf16")
    try:
        product = makers[recipe](recipe)
    except ImportError as error:
        raise ConfigError(f"{_named(recipe)} needs torchao and its kernels: {error}") from error
    _try(product, device_type, recipe)
    return product


def float8_product(recipe: str, emulate: bool = False) -> Product:
    """The recipes of torchao.float8."""
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    named = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(named, emulate=emulate, pad_inner_dim=not emulate)
    mm_config = Float8Linear(16, 16, bias=False, config=config).linear_mm_config

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight.to(x.dtype).t(), mm_config, config)

    return product


def mxfp8_product(emulate: bool = False) -> Product:
    """torchao's products of MX formats (OCP Microscaling Formats 1.0), as it trains by them."""
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    formats = (torch.float8_e4m3fn,) * 3
    along_rows, along_columns = MXFP8Dim0CastKernelChoice, MXFP8Dim1CastKernelChoice
    kernels = (
        (KernelPreference.EMULATED, along_rows.TORCH, along_columns.TORCH)
        if emulate
        else (KernelPreference.AUTO, along_rows.TRITON, along_columns.CUDA)
    )
    mode = ScaleCalculationMode.RCEIL

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return mx_mm.apply(x.contiguous(), weight.to(x.dtype), *formats, 32, *kernels, mode, False)

    return product


def _blockwise_product() -> Product:
    """torchao's products of blocks of 128, whose kernels are Triton's alone."""
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return fp8_blockwise_mm.apply(x.contiguous(), weight.to(x.dtype), 128, x.dtype, False)

    return product


def _nvfp4_product() -> Product:
    """torchao's NVFP4 training, whose kernels are Triton's alone."""
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_linear

    def product(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = nvfp4_linear(rows, weight.to(x.dtype), sign_vector=SIGNS)
        return out.reshape(*x.shape[:-1], -1)

    return product


_MAKERS: dict[str, Callable[[str], Product]] = {
    **dict.fromkeys(("tensorwise", "rowwise", "rowwise_with_gw_hp"), float8_product),
    "blockwise": lambda _: _blockwise_product(),
    "mxfp8": lambda _: mxfp8_product(),
    "nvfp4": lambda _: _nvfp4_product(),
}


def _try(product: Product, device_type: str, recipe: str) -> None:
    """Raise ConfigError where one small product and its gradients fail.

    Only a try tells: which GPUs a scale a row is for differs between versions of PyTorch.
    """
    x, weight = (
        torch.ones(128, 128, dtype=torch.bfloat16, device=device_type, requires_grad=True)
        for _ in range(2)
    )
    try:
        product(x, weight).sum().backward()
    except (RuntimeError, ValueError, AssertionError, AttributeError, ImportError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{_named(recipe)}: this device does not multiply so with PyTorch "
            f"{torch.__version__} ({reason}); use training.{_instead(recipe)}"
        ) from error


def _named(recipe: str) -> str:
    """The setting that asks for a recipe."""
    return f"training.dtype {recipe}" if recipe in NARROW else f"training.fp8_recipe {recipe}"


def _instead(recipe: str) -> str:
    """The setting that asks for the next simpler products."""
    if recipe in NARROW:
        return "dtype=fp8"
    return "dtype=bf16" if recipe == "tensorwise" else "fp8_recipe=tensorwise"
