"""Matrix products in float8 by torchao: inputs, weights and gradients scaled tensor by tensor.

Every product casts its two operands with a scale from their own largest value (e4m3 forward, e5m2
for gradients) and gives its result in the compute dtype. Over a tensor-parallel axis the scales are
each rank's own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from paceline.trainer.config import ConfigError

Float8Settings = tuple[Any, tuple[Any, Any]]
"""torchao's differentiable product, and the configurations that it takes."""


def float8_product(x: Tensor, weight: Tensor, settings: Float8Settings) -> Tensor:
    """(..., in) x (out, in) -> (..., out) in x's dtype, by what `float8_settings` gave."""
    product, configs = settings
    return product.apply(x, weight.to(x.dtype).t(), *configs)


@cache
def float8_settings(device_type: str) -> Float8Settings:
    """How a device multiplies; a CPU emulates the rounding. Raises ConfigError without torchao.

    To be asked for before anything is compiled, because the compiler would follow the imports.
    """
    try:
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    except ImportError as error:
        raise ConfigError(f"training.dtype fp8 needs torchao: {error}") from error
    emulate = device_type == "cpu"
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=not emulate)
    layer = Float8Linear(16, 16, bias=False, config=config)
    return matmul_with_hp_or_float8_args, (layer.linear_mm_config, config)
