"""Settings of a decoder's layers that do not depend on its sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from paceline.trainer.config import LoraConfig
from paceline.trainer.model.experts import LEARNED, RoutingSetting
from paceline.trainer.parallel.mesh import ALONE, MeshAxis
from paceline.trainer.parallel.tensor import NO_TP, TensorParallel


@dataclass(frozen=True)
class LayerSetting:
    """Settings of the computation that do not depend on the model's sizes."""

    seq_len: int
    dtype: torch.dtype
    recompute: str = "none"
    tp: TensorParallel = NO_TP
    cp: MeshAxis = ALONE
    cp_exchange: str = "all-gather"
    ep: MeshAxis = ALONE
    lora: LoraConfig | None = None
    levels: tuple[str, ...] = ()
    """Recompute setting of each layer; empty where all layers use `recompute`."""
    routing: RoutingSetting = LEARNED
    mtp_loss_weight: float = 0.3
    """Weight of the loss of multi-token prediction."""

    def for_layer(self, layer: int) -> LayerSetting:
        """Return the setting of one layer's block."""
        return replace(self, recompute=self.levels[layer]) if self.levels else self

    def adapter(self, layer: str) -> LoraConfig | None:
        """Return the LoRA settings of a linear layer of a block; None without an adapter."""
        return self.lora if self.lora and layer in self.lora.targets else None
