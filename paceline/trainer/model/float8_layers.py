"""Which layers of a decoder multiply in float8."""

from __future__ import annotations

from paceline.trainer.model.float8 import float8_settings
from paceline.trainer.model.layers import Linear
from paceline.trainer.model.network import Network

FEW_OUTPUTS = 4
"""A layer has few outputs when it has so many times more inputs."""


def use_float8(model: Network, device_type: str, recipe: str) -> None:
    """Have the linear layers of all blocks multiply in float8; head and adapters stay as they are.

    On a GPU so do layers with few outputs, such as the keys of grouped heads: casting their input
    takes longer than their product saves. Raises what `float8_settings` raises.
    """
    settings = float8_settings(device_type, recipe)
    for module in model.blocks.modules():
        if isinstance(module, Linear):
            narrow = module.out_features * FEW_OUTPUTS <= module.in_features
            module.float8 = None if narrow and device_type == "cuda" else settings
