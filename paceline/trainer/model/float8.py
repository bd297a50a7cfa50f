"""Matrix products in float8 by torchao, whose recipes say what shares a scale.

`tensorwise`: each operand has a scale from its largest value (e4m3 forward, e5m2 for gradients).
`rowwise`: each row along the summed dimension has one, a power of two (e4m3 throughout).
`rowwise_with_gw_hp`: the same, but the weight's tensorwise for the input's gradient, and the
weight's gradient is computed in the compute dtype. Results are in the compute dtype. Over a
tensor-parallel axis the scales are each rank's own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.trainer.config import ConfigError

Float8Settings = tuple[Any, tuple[Any, Any]]
"""torchao's differentiable product, and the configurations that it takes."""


def float8_product(x: Tensor, weight: Tensor, settings: Float8Settings) -> Tensor:
    """(..., in) x (out, in) -> (..., out) in x's dtype, by what `float8_settings` gave."""
    product, configs = settings
    return product.apply(x, weight.to(x.dtype).t(), *configs)


@cache
def float8_settings(device_type: str, recipe: str) -> Float8Settings:
    """How a device multiplies by a recipe of torchao; a CPU emulates the rounding.

    To be asked for before anything is compiled, because the compiler would follow the imports.
    Raises ConfigError without torchao, and where the device or its PyTorch lacks the products.
    """
    try:
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    except ImportError as error:
        raise ConfigError(f"training.dtype fp8 needs torchao: {error}") from error
    emulate = device_type == "cpu"
    named = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(named, emulate=emulate, pad_inner_dim=not emulate)
    layer = Float8Linear(16, 16, bias=False, config=config)
    settings = matmul_with_hp_or_float8_args, (layer.linear_mm_config, config)
    _try(settings, device_type, recipe)
    return settings


def _try(settings: Float8Settings, device_type: str, recipe: str) -> None:
    """Raise ConfigError where one small product and its gradients fail.

    Only a try tells: which GPUs a scale a row is for differs between versions of PyTorch.
    """
    x, weight = (
        torch.ones(128, 128, dtype=torch.bfloat16, device=device_type, requires_grad=True)
        for _ in range(2)
    )
    try:
        float8_product(x, weight, settings).sum().backward()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        instead = "dtype=bf16" if recipe == "tensorwise" else "fp8_recipe=tensorwise"
        raise ConfigError(
            f"training.fp8_recipe {recipe}: this device does not multiply so with PyTorch "
            f"{torch.__version__} ({reason}); use training.{instead}"
        ) from error
