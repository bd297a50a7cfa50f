"""Rotary positions: tables of angles, and heads turned by them."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.trainer.model_config import ModelConfig

Rope = tuple[Tensor, Tensor] | None
"""Tables of cos and signed sin, (T, 1, D) each; None where positions do not rotate."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, T, N, D) turned by its positions; `sin` carries the sign of the half it belongs to.

    Features beyond those of the tables stay as they are.
    """
    if cos.shape[-1] < x.shape[-1]:
        turned, rest = x.tensor_split([cos.shape[-1]], dim=-1)
        return torch.cat([rotate(turned, cos, sin), rest], dim=-1)
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)


def rope_tables(
    model: ModelConfig, positions: Tensor, windowed: bool = False
) -> tuple[Tensor, Tensor]:
    """cos and signed sin of rotary embeddings (Su et al., arXiv:2104.09864), (T, 1, D) in fp64.

    Layers with a window may have a base of their own, and then rotate by unscaled positions.
    """
    half = model.rotary_dim // 2
    theta, scale = model.rope_theta, model.rope_scaling_factor
    if windowed and model.rope_local_theta is not None:
        theta, scale = model.rope_local_theta, 1.0
    rate = theta ** (-torch.arange(half, dtype=torch.float64) / half) / scale
    angle = torch.outer(positions.double(), rate)
    cos, sin = (model.rope_attention_factor * table for table in (angle.cos(), angle.sin()))
    return torch.cat([cos, cos], -1).unsqueeze(1), torch.cat([-sin, sin], -1).unsqueeze(1)


def rope_tables_on(
    device: torch.device,
    dtype: torch.dtype,
    model: ModelConfig,
    positions: Tensor,
    windowed: bool = False,
) -> tuple[Tensor, Tensor]:
    """The tables where and in what they are used."""
    cos, sin = rope_tables(model, positions, windowed)
    return cos.to(device, dtype), sin.to(device, dtype)
