"""Low-precision products on a CPU, which the trainer refuses: what a format does to the numbers.

torchao emulates most formats itself. For what it trains with kernels for GPUs alone products are
rounded here as a GPU rounds them, and computed in fp32: blocks of 128 (DeepSeek-V3,
arXiv:2412.19437, section 3.3; torchao.prototype.blockwise_fp8_training) and NVFP4 with
two-dimensional scales of weights, and in the backward pass stochastic rounding and, for the
weight's gradient, a random Hadamard transform (NVIDIA, arXiv:2509.25149;
torchao.prototype.moe_training.nvfp4_training).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.trainer.model import low_precision
from paceline.trainer.model.low_precision import SIGNS, float8_product, mxfp8_product

E4M3_MAX, E2M1_MAX = 448.0, 6.0
LEAST_AMAX = 1e-12
LEAST_SCALE = 2.0**-6
"""e4m3's smallest normal number."""
FP8_BLOCK, FP4_BLOCK = 128, 16


def install() -> None:
    """Let this process train in every recipe on a CPU."""
    low_precision.CPU_PRODUCTS.update(
        blockwise=lambda _: blockwise_product,
        nvfp4=lambda _: nvfp4_product,
        mxfp8=lambda _: mxfp8_product(emulate=True),
        **{
            recipe: lambda recipe: float8_product(recipe, emulate=True)
            for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
        },
    )


def blockwise_product(x: Tensor, weight: Tensor) -> Tensor:
    """(..., in) x (out, in) -> (..., out) in x's dtype; 128 divides both, and in training rows."""
    return _Blockwise.apply(x, weight)


def nvfp4_product(x: Tensor, weight: Tensor) -> Tensor:
    """(..., in) x (out, in) -> (..., out) in x's dtype; 16 divides both, and in training rows."""
    return _Nvfp4.apply(x, weight)


class _Blockwise(torch.autograd.Function):
    """x 1 x 128, weights 128 x 128, gradients 1 x 128; along what a product sums over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide, block = weight.float(), (FP8_BLOCK, FP8_BLOCK)
        return (fp8_rounded(x.float(), (1, FP8_BLOCK)) @ fp8_rounded(wide, block).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient, line = above[0].float(), (1, FP8_BLOCK)
        wide = fp8_rounded(weight.float(), (FP8_BLOCK, FP8_BLOCK))
        of_x = (fp8_rounded(gradient, line) @ wide).to(x.dtype)
        if not ctx.needs_input_grad[1]:
            return of_x, None
        rows, inputs = gradient.flatten(0, -2).t(), x.float().flatten(0, -2).t()
        return of_x, (fp8_rounded(rows, line) @ fp8_rounded(inputs, line).t()).to(weight.dtype)


class _Nvfp4(torch.autograd.Function):
    """x 1 x 16, weights 16 x 16, gradients 1 x 16 rounded at random; along what is summed over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide, block = weight.float(), (FP4_BLOCK, FP4_BLOCK)
        return (fp4_rounded(x.float(), (1, FP4_BLOCK)) @ fp4_rounded(wide, block).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient, line = above[0].float(), (1, FP4_BLOCK)
        wide = fp4_rounded(weight.float(), (FP4_BLOCK, FP4_BLOCK))
        of_x = (fp4_rounded(gradient, line, at_random=True) @ wide).to(x.dtype)
        if not ctx.needs_input_grad[1]:
            return of_x, None
        rows = fp4_rounded(mixed(gradient.flatten(0, -2).t()), line, at_random=True)
        inputs = fp4_rounded(mixed(x.float().flatten(0, -2).t()), line)
        return of_x, (rows @ inputs.t()).to(weight.dtype)


def fp8_rounded(x: Tensor, block: tuple[int, int]) -> Tensor:
    """fp32 (..., R, C) as e4m3 holds it with a scale for every block of rows x columns."""
    scale = E4M3_MAX / _largest(x, block).clamp(min=LEAST_AMAX)
    return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale


def fp4_rounded(x: Tensor, block: tuple[int, int], at_random: bool = False) -> Tensor:
    """fp32 (..., R, C) as NVFP4 holds it: e2m1, a scale in e4m3 a block, one in fp32 for all."""
    whole = (x.abs().amax() / (E4M3_MAX * E2M1_MAX)).clamp(min=LEAST_AMAX)
    own = (_largest(x, block) / E2M1_MAX / whole).clamp(LEAST_SCALE, E4M3_MAX)
    scale = own.to(torch.float8_e4m3fn).to(x.dtype) * whole
    return e2m1_rounded((x / scale).clamp(-E2M1_MAX, E2M1_MAX), at_random) * scale


def e2m1_rounded(x: Tensor, at_random: bool) -> Tensor:
    """Numbers of up to 6 as one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their sign.

    To the nearest, of two the even one; at random: to either neighbour, so that the mean is x.
    """
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = torch.floor(size / step + torch.rand_like(x)) if at_random else (size / step).round()
    return torch.copysign(steps * step, x)


def mixed(x: Tensor) -> Tensor:
    """(..., C) -> (..., C), every 16 numbers times signs and an orthogonal Hadamard matrix."""
    matrix = x.new_ones(1, 1)
    while len(matrix) < FP4_BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = x.new_tensor(SIGNS)
    parts = x.unflatten(-1, (-1, FP4_BLOCK)) * signs
    return (parts @ matrix / FP4_BLOCK**0.5).flatten(-2)


def _largest(x: Tensor, block: tuple[int, int]) -> Tensor:
    """(..., R, C) -> the largest size in the block of each number, of the same shape."""
    rows, columns = block
    parts = x.abs().unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    largest = parts.amax((-3, -1), keepdim=True)
    return largest.expand_as(parts).flatten(-2).flatten(-3, -2)
