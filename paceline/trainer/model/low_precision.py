"""GEMMs in 8 and 4 bits with torchao; the recipe defines which elements share a scale.

`tensorwise`: one scale per operand from its largest value (e4m3 forward, e5m2 for gradients).
`rowwise`: one power-of-two scale per row along the summed dimension (e4m3 throughout).
`rowwise_with_gw_hp`: as `rowwise`, with a tensorwise weight scale for the input's gradient; the
weight's gradient is computed in the compute dtype.
`blockwise`: one scale per 128 elements of a row, or per 128 x 128 block of a weight (e4m3).
`mxfp8`: one power-of-two scale per 32 elements along the summed dimension (e4m3 throughout).
`nvfp4`: one e4m3 scale per 16 elements, or per 16 x 16 block of a weight, and one per tensor.

Experts have grouped GEMMs in `rowwise` and `mxfp8`.

Results are in the compute dtype. With tensor parallelism each rank computes its own scales. CPUs
are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.trainer.config import NARROW, ConfigError
from paceline.trainer.model.grouped_gemm import GroupedGemm

T = TypeVar("T")
Gemm = Callable[[Tensor, Tensor], Tensor]
"""Differentiable (..., in) x (out, in) -> (..., out), in the dtype of the first operand."""
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Signs of the random Hadamard transform, fixed because all replicas must share them."""
ROWS_BY_RECIPE = {"rowwise": 16, "mxfp8": 32}
"""Recipes with grouped GEMMs, and the divisor of each expert's rows."""


@cache
def low_precision_gemm(device_type: str, recipe: str) -> Gemm:
    """Return the GEMM of a recipe on a device.

    Call it before anything is compiled, because the compiler would follow the imports. Raise
    ConfigError without torchao, and where the device or its PyTorch does not support the recipe.
    """
    gemm = _from_factory(_FACTORIES, device_type, recipe)
    _check_support(gemm, device_type, recipe)
    return gemm


@cache
def low_precision_grouped_gemm(device_type: str, recipe: str) -> GroupedGemm:
    """Return the grouped GEMM of a recipe in `ROWS_BY_RECIPE`; raise as `low_precision_gemm`."""
    gemm = _from_factory(_GROUPED_FACTORIES, device_type, recipe)
    ends = torch.tensor([32, 128], dtype=torch.int32, device=device_type)
    _check_support(
        lambda rows, weight: gemm(rows, weight, ends),
        device_type,
        recipe,
        shapes=((128, 128), (2, 128, 128)),
        instead="dtype=bf16",
    )
    return gemm


def _from_factory(factories: Mapping[str, Callable[[str], T]], device_type: str, recipe: str) -> T:
    if device_type == "cpu":
        raise ConfigError(f"{_setting(recipe)} needs a GPU; on a CPU use training.dtype=bf16")
    try:
        return factories[recipe](recipe)
    except ImportError as error:
        raise ConfigError(f"{_setting(recipe)} needs torchao and its kernels: {error}") from error


def _float8_gemm(recipe: str) -> Gemm:
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
    mm_config = Float8Linear(16, 16, bias=False, config=config).linear_mm_config

    def gemm(x: Tensor, weight: Tensor) -> Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight.to(x.dtype).t(), mm_config, config)

    return gemm


def _mxfp8_gemm(_recipe: str) -> Gemm:
    # OCP Microscaling Formats (MX) 1.0
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    formats = (torch.float8_e4m3fn,) * 3
    kernels = (
        KernelPreference.AUTO,
        MXFP8Dim0CastKernelChoice.TRITON,
        MXFP8Dim1CastKernelChoice.CUDA,
    )
    mode = ScaleCalculationMode.RCEIL

    def gemm(x: Tensor, weight: Tensor) -> Tensor:
        return mx_mm.apply(x.contiguous(), weight.to(x.dtype), *formats, 32, *kernels, mode, False)

    return gemm


def _blockwise_gemm(_recipe: str) -> Gemm:
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    def gemm(x: Tensor, weight: Tensor) -> Tensor:
        return fp8_blockwise_mm.apply(x.contiguous(), weight.to(x.dtype), 128, x.dtype, False)

    return gemm


def _nvfp4_gemm(_recipe: str) -> Gemm:
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_linear

    def gemm(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = nvfp4_linear(rows, weight.to(x.dtype), sign_vector=SIGNS)
        return out.reshape(*x.shape[:-1], -1)

    return gemm


_FACTORIES: dict[str, Callable[[str], Gemm]] = {
    **dict.fromkeys(("tensorwise", "rowwise", "rowwise_with_gw_hp"), _float8_gemm),
    "blockwise": _blockwise_gemm,
    "mxfp8": _mxfp8_gemm,
    "nvfp4": _nvfp4_gemm,
}


def _rowwise_grouped_gemm(_recipe: str) -> GroupedGemm:
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

    # Its padding has no kernel yet, so the default fails.
    return _grouped_gemm(
        _to_fp8_rowwise_then_scaled_grouped_mm, pad_token_groups_for_grouped_mm=False
    )


def mxfp8_grouped_gemm(_recipe: str, kernels: str = "AUTO") -> GroupedGemm:
    """Return torchao's grouped GEMM; `kernels` is a name of its KernelPreference."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    return _grouped_gemm(
        _to_mxfp8_then_scaled_grouped_mm,
        kernel_preference=KernelPreference[kernels],
        scale_calculation_mode=ScaleCalculationMode.RCEIL,
    )


def _grouped_gemm(multiply: Callable[..., Tensor], **options: Any) -> GroupedGemm:
    """Return one of torchao's functions with these options as a grouped GEMM."""

    def gemm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        weight_t = weight.transpose(1, 2)  # (E, K, N), each expert in column-major order
        return multiply(rows.contiguous(), weight_t, ends, out_dtype=rows.dtype, **options)

    return gemm


_GROUPED_FACTORIES: dict[str, Callable[[str], GroupedGemm]] = {
    "rowwise": _rowwise_grouped_gemm,
    "mxfp8": mxfp8_grouped_gemm,
}


def _check_support(
    gemm: Gemm,
    device_type: str,
    recipe: str,
    shapes: Sequence[tuple[int, ...]] = ((128, 128), (128, 128)),
    instead: str | None = None,
) -> None:
    """Raise ConfigError where a small GEMM or its gradients fail on the device.

    The GPUs that a recipe supports differ between versions of PyTorch, so this runs one with
    operands of these shapes. `instead` is a setting to suggest; by default the next simpler format.
    """
    x, weight = (
        torch.ones(shape, dtype=torch.bfloat16, device=device_type, requires_grad=True)
        for shape in shapes
    )
    try:
        gemm(x, weight).sum().backward()
    except (RuntimeError, ValueError, AssertionError, AttributeError, ImportError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{_setting(recipe)}: this device does not support it with PyTorch "
            f"{torch.__version__} ({reason}); use training.{instead or _fallback_setting(recipe)}"
        ) from error


def _setting(recipe: str) -> str:
    """Return the setting that selects a recipe."""
    return f"training.dtype {recipe}" if recipe in NARROW else f"training.fp8_recipe {recipe}"


def _fallback_setting(recipe: str) -> str:
    """Return the setting of the next simpler format."""
    if recipe in NARROW:
        return "dtype=fp8"
    return "dtype=bf16" if recipe == "tensorwise" else "fp8_recipe=tensorwise"
