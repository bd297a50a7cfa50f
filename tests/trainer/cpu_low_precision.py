"""Low-precision GEMMs on a CPU, which the trainer rejects: the rounding error of each format.

torchao simulates most formats itself. For the formats that it trains with GPU kernels only,
operands are rounded here as a GPU rounds them and multiplied in fp32: blocks of 128 (DeepSeek-V3,
arXiv:2412.19437, section 3.3; torchao.prototype.blockwise_fp8_training), and NVFP4 with
two-dimensional scales of weights. NVFP4's backward pass has stochastic rounding and, for the
weight's grad, a random Hadamard transform (NVIDIA, arXiv:2509.25149;
torchao.prototype.moe_training.nvfp4_training).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.trainer.model.grouped_gemm import GroupedGemm
from paceline.trainer.model.low_precision import SIGNS, Gemm, mxfp8_grouped_gemm
from paceline.trainer.replica import assembly

E4M3_MAX, E2M1_MAX = 448.0, 6.0
MIN_AMAX = 1e-12
E4M3_MIN_NORMAL = 2.0**-6
FP8_BLOCK, FP4_BLOCK = 128, 16


def install() -> None:
    """Let this process train with every recipe on a CPU."""
    assembly.low_precision_gemm = lambda _device, recipe: cpu_gemm(recipe)
    assembly.low_precision_grouped_gemm = lambda _device, recipe: cpu_grouped_gemm(recipe)


@cache
def cpu_gemm(recipe: str) -> Gemm:
    """Return a recipe's GEMM for a CPU."""
    if recipe == "mxfp8":
        return _mxfp8_gemm()
    return {"blockwise": blockwise_gemm, "nvfp4": nvfp4_gemm}.get(recipe) or _float8_gemm(recipe)


@cache
def cpu_grouped_gemm(recipe: str) -> GroupedGemm:
    """Return a recipe's grouped GEMM: torchao's own of mxfp8, else one GEMM per expert."""
    if recipe == "mxfp8":
        return mxfp8_grouped_gemm(recipe, "EMULATED")
    gemm = cpu_gemm(recipe)

    def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        parts = rows.tensor_split(ends.tolist())
        outputs = [
            (gemm if len(part) else functional.linear)(part, matrix)
            for part, matrix in zip(parts, weight, strict=False)
        ]
        return torch.cat([*outputs, rows.new_zeros(len(parts[-1]), weight.shape[1])])

    return grouped


def _float8_gemm(recipe: str) -> Gemm:
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    mm_config = Float8Linear(16, 16, bias=False, config=config).linear_mm_config

    def gemm(x: Tensor, weight: Tensor) -> Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight.to(x.dtype).t(), mm_config, config)

    return gemm


def _mxfp8_gemm() -> Gemm:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    formats = (torch.float8_e4m3fn,) * 3
    kernels = (
        KernelPreference.EMULATED,
        MXFP8Dim0CastKernelChoice.TORCH,
        MXFP8Dim1CastKernelChoice.TORCH,
    )
    mode = ScaleCalculationMode.RCEIL

    def gemm(x: Tensor, weight: Tensor) -> Tensor:
        return mx_mm.apply(x.contiguous(), weight.to(x.dtype), *formats, 32, *kernels, mode, False)

    return gemm


def blockwise_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """Map (..., in) x (out, in) to (..., out) in x's dtype; 128 divides both, and training rows."""
    return _Blockwise.apply(x, weight)


def nvfp4_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """Map (..., in) x (out, in) to (..., out) in x's dtype; 16 divides both, and training rows."""
    return _Nvfp4.apply(x, weight)


class _Blockwise(torch.autograd.Function):
    """One scale per 1 x 128 elements of x and of gradients, and per 128 x 128 of weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide, block = weight.float(), (FP8_BLOCK, FP8_BLOCK)
        return (round_to_fp8(x.float(), (1, FP8_BLOCK)) @ round_to_fp8(wide, block).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_out: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad, line = grad_out[0].float(), (1, FP8_BLOCK)
        wide = round_to_fp8(weight.float(), (FP8_BLOCK, FP8_BLOCK))
        grad_x = (round_to_fp8(grad, line) @ wide).to(x.dtype)
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        rows, inputs = grad.flatten(0, -2).t(), x.float().flatten(0, -2).t()
        return grad_x, (round_to_fp8(rows, line) @ round_to_fp8(inputs, line).t()).to(weight.dtype)


class _Nvfp4(torch.autograd.Function):
    """One scale per 1 x 16 elements of x and of gradients, and per 16 x 16 of weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide, block = weight.float(), (FP4_BLOCK, FP4_BLOCK)
        return (round_to_nvfp4(x.float(), (1, FP4_BLOCK)) @ round_to_nvfp4(wide, block).t()).to(
            x.dtype
        )

    @staticmethod
    def backward(ctx: Any, *grad_out: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad, line = grad_out[0].float(), (1, FP4_BLOCK)
        wide = round_to_nvfp4(weight.float(), (FP4_BLOCK, FP4_BLOCK))
        grad_x = (round_to_nvfp4(grad, line, stochastic=True) @ wide).to(x.dtype)
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        rows = round_to_nvfp4(hadamard_transform(grad.flatten(0, -2).t()), line, stochastic=True)
        inputs = round_to_nvfp4(hadamard_transform(x.float().flatten(0, -2).t()), line)
        return grad_x, (rows @ inputs.t()).to(weight.dtype)


def round_to_fp8(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Round fp32 (..., R, C) to e4m3 with one scale per block of rows x columns."""
    scale = E4M3_MAX / _block_amax(x, block).clamp(min=MIN_AMAX)
    return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale


def round_to_nvfp4(x: Tensor, block: tuple[int, int], stochastic: bool = False) -> Tensor:
    """Round fp32 (..., R, C) to NVFP4: e2m1, an e4m3 scale per block, an fp32 scale per tensor."""
    tensor_scale = (x.abs().amax() / (E4M3_MAX * E2M1_MAX)).clamp(min=MIN_AMAX)
    block_scale = (_block_amax(x, block) / E2M1_MAX / tensor_scale).clamp(E4M3_MIN_NORMAL, E4M3_MAX)
    scale = block_scale.to(torch.float8_e4m3fn).to(x.dtype) * tensor_scale
    return round_to_e2m1((x / scale).clamp(-E2M1_MAX, E2M1_MAX), stochastic) * scale


def round_to_e2m1(x: Tensor, stochastic: bool) -> Tensor:
    """Round numbers up to 6 to 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with their sign.

    Ties round to even. Stochastic rounding takes either neighbour, so that the mean is x.
    """
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = torch.floor(size / step + torch.rand_like(x)) if stochastic else (size / step).round()
    return torch.copysign(steps * step, x)


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiply every 16 numbers of (..., C) by SIGNS and an orthogonal Hadamard matrix."""
    matrix = x.new_ones(1, 1)
    while len(matrix) < FP4_BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = x.new_tensor(SIGNS)
    parts = x.unflatten(-1, (-1, FP4_BLOCK)) * signs
    return (parts @ matrix / FP4_BLOCK**0.5).flatten(-2)


def _block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude in the block of each number of (..., R, C), in x's shape."""
    rows, columns = block
    parts = x.abs().unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    largest = parts.amax((-3, -1), keepdim=True)
    return largest.expand_as(parts).flatten(-2).flatten(-3, -2)
