"""Low-rank adapters in the form of peft: adapter_config.json and adapter_model.safetensors.

Names are those of the adapted layer behind `base_model.model.`, as peft 0.21 saves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.trainer.checkpoint_reader import UnsoundCheckpointError
from paceline.trainer.config import LoraConfig
from paceline.trainer.hub.names import INNER, HubWeight, Shape, places, plain
from paceline.trainer.model_config import ModelConfig

PREFIX = "base_model.model."
MATRICES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}


def adapter_weights(
    family: str, model: ModelConfig, lora: LoraConfig, shapes: Mapping[str, Shape]
) -> dict[str, HubWeight]:
    """The adapters of these shapes by peft's tensors.

    Raises UnsoundCheckpointError where adapters alone are not what was trained.
    """
    if lora.train_rest:
        raise UnsoundCheckpointError("more than adapters was trained; export it merged")
    if family == "gpt2":
        raise UnsoundCheckpointError(
            "GPT-2 has query, key and value in one layer there, which adapters of each do not fit; "
            "export it merged"
        )
    table = places(family, model)
    weights: dict[str, HubWeight] = {}
    for ours, shape in shapes.items():
        layer, _, matrix = ours.rpartition(".")
        module = table[f"{layer}.weight"].name.removesuffix(".weight")
        weights[ours] = plain(f"{PREFIX}{module}.{MATRICES[matrix]}", shape)
    return weights


def adapter_settings(family: str, lora: LoraConfig, base: str | None) -> dict[str, Any]:
    """adapter_config.json; `base` is the model that is adapted."""
    modules = {
        theirs.rpartition(".")[2]
        for ours, theirs in INNER[family].items()
        if ours.rpartition(".")[2] in lora.targets
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
