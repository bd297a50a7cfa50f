"""Matrix products in float8 through torchao: inputs, weights and gradients are scaled tensor by tensor.

Every product casts its two operands with a scale from their own largest value (e4m3 forward, e5m2
for gradients) and gives its result in the compute dtype. Over a tensor-parallel axis the scales are
each rank's own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from config import ConfigError


def float8_product(x: Tensor, weight: Tensor) -> Tensor:
    """(..., in) x (out, in) -> (..., out) in x's dtype; on a CPU the rounding is emulated."""
    product, settings = _torchao(x.device.type == "cpu")
    return product.apply(x, weight.to(x.dtype).t(), *settings)


@cache
def _torchao(emulate: bool) -> tuple[Any, tuple[Any, Any]]:
    """torchao's differentiable product and its settings; raises ConfigError without torchao."""
    try:
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    except ImportError as error:
        raise ConfigError(f"training.dtype fp8 needs torchao: {error}") from error
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=not emulate)
    layer = Float8Linear(16, 16, bias=False, config=config)
    return matmul_with_hp_or_float8_args, (layer.linear_mm_config, config)
