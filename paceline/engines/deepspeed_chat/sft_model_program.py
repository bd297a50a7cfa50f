# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportMissingModuleSource=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
"""Model to fine-tune: from a folder or Hugging Face, with DeepSpeed-Chat's LoRA adapters."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
WEIGHTS = ("*.safetensors", "*.bin")
ADAPTERS = ("lora_down", "lora_up")
NO_WEIGHT_DECAY = ("bias", "norm.weight")


@dataclass(frozen=True)
class ModelOptions:
    """Model options in addition to its configuration."""

    name: str
    dtype: str
    attention: str
    dropout: bool
    load_weights: bool
    checkpointing: bool
    lora_rank: int
    lora_modules: str
    only_lora: bool


class LoraLinear(nn.Module):
    """Frozen linear layer with an adapter: W x + b + up(down(x)) / rank; the bias is trained."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.weight.requires_grad_(False)
        place: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.lora_down = nn.Parameter(torch.empty(rank, linear.in_features, **place))
        self.lora_up = nn.Parameter(torch.zeros(linear.out_features, rank, **place))
        nn.init.kaiming_uniform_(self.lora_down, a=math.sqrt(5))
        self.scaling = 1 / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in) to (..., out)."""
        low = nn.functional.linear(x, self.lora_down)
        update = nn.functional.linear(low, self.lora_up) * self.scaling
        return nn.functional.linear(x, self.weight, self.bias) + update


def make_model(options: ModelOptions, device: torch.device, zero_stage: int) -> nn.Module:
    """Return the model in the training dtype; weights are random if its folder has none."""
    config = AutoConfig.from_pretrained(options.name)
    if not options.dropout:
        for name in ("dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if hasattr(config, name):
                setattr(config, name, 0.0)
    if hasattr(config, "layerdrop"):
        config.layerdrop = 0.0
    config.use_cache = False
    dtype = DTYPES[options.dtype] if device.type != "cpu" else torch.float32
    keywords: dict[str, Any] = {"dtype": dtype, "attn_implementation": options.attention}
    if options.load_weights and _has_weights(options.name):
        model = AutoModelForCausalLM.from_pretrained(options.name, config=config, **keywords)
    else:
        with _placement(device, zero_stage):
            model = AutoModelForCausalLM.from_config(config, **keywords)
    if options.lora_rank:
        add_adapters(model, options.lora_modules, options.lora_rank)
        if options.only_lora:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.endswith(ADAPTERS))
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _has_weights(name: str) -> bool:
    """Return whether a folder has weights; Hugging Face names always do."""
    folder = Path(name)
    return not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in WEIGHTS)


def _placement(device: torch.device, zero_stage: int) -> AbstractContextManager[Any]:
    """Return the context that places random weights: on the device, or on the CPU for ZeRO-3.

    ZeRO-3 shards them from the CPU. `deepspeed.zero.Init` would shard them immediately, and
    transformers could then not initialize them.
    """
    return nullcontext() if device.type == "cpu" or zero_stage == 3 else device


def add_adapters(model: nn.Module, modules: str, rank: int) -> None:
    """Replace every linear layer whose name contains `modules`."""
    layers = [(name, layer) for name, layer in model.named_modules() if modules in name]
    linears = [(name, layer) for name, layer in layers if isinstance(layer, nn.Linear)]
    if not linears:
        raise SystemExit(f"error: --lora_module_name {modules}: no linear layer has this name")
    for name, linear in linears:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LoraLinear(linear, rank))


def parameter_groups(model: nn.Module, weight_decay: float, lora_lr: float) -> list[dict[str, Any]]:
    """Return parameter groups: weight decay, adapters at `lora_lr`, no weight decay."""
    with_decay: list[nn.Parameter] = []
    adapters: list[nn.Parameter] = []
    without_decay: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith(ADAPTERS):
            adapters.append(parameter)
        elif name.lower().endswith(NO_WEIGHT_DECAY):
            without_decay.append(parameter)
        else:
            with_decay.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": with_decay, "weight_decay": weight_decay},
        {"params": adapters, "weight_decay": weight_decay, "lr": lora_lr},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
