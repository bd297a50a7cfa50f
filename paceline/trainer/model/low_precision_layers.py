"""Which layers of a decoder multiply in low precision."""

from __future__ import annotations

from paceline.trainer.model.layers import Linear
from paceline.trainer.model.low_precision import low_precision_product
from paceline.trainer.model.network import Network

FEW_OUTPUTS = 4
"""A layer has few outputs when it has so many times more inputs."""


def use_low_precision(model: Network, device_type: str, recipe: str) -> None:
    """Have the linear layers of all blocks multiply so; head and adapters stay as they are.

    On a GPU so do layers with few outputs, such as the keys of grouped heads: casting their input
    takes longer than their product saves. Raises as `low_precision_product`.
    """
    product = low_precision_product(device_type, recipe)
    for module in model.blocks.modules():
        if isinstance(module, Linear):
            narrow = module.out_features * FEW_OUTPUTS <= module.in_features
            module.low_precision = None if narrow and device_type == "cuda" else product
