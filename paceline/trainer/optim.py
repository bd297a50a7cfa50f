"""The optimizer, the clipping of gradients, and fp16's loss scale."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.trainer.config import LossScaleConfig, TrainingConfig, is_adapter
from paceline.trainer.parallel.mesh import MeshAxis
from paceline.trainer.replica.replica import Replica
from paceline.trainer.replica.weight_slices import LocalShards, WeightSlices
from paceline.trainer.schedule import RATE_TIMES


def make_optimizer(
    replica: Replica,
    training: TrainingConfig,
    shard_state: MeshAxis | None,
    adapter_lr: float | None,
) -> torch.optim.Optimizer:
    """Fused AdamW without weight decay on vectors; ranks of `shard_state` share it (ZeRO 1).

    Adapters are a group of their own where they have a learning rate of their own.
    """
    trained = [(name, p) for name, p in replica.named_parameters() if p.requires_grad]
    apart = {name for name, _ in trained if adapter_lr is not None and is_adapter(name)}
    rest = [p for name, p in trained if name not in apart]
    adapters = [p for name, p in trained if name in apart]
    decay, times = training.weight_decay, (adapter_lr or training.lr) / training.lr
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
        {"params": adapters, "weight_decay": decay, RATE_TIMES: times},
    ]
    groups = [group for group in groups if group["params"]]
    if shard_state is not None:
        replica.slices = WeightSlices((p for _, p in trained), shard_state)
        pieces = replica.slices.pieces
        for group in groups:
            group["params"] = [pieces[p].weight for p in group["params"] if p in pieces]
    elif replica.sharded:
        replica.shards = LocalShards(p for _, p in trained)
        for group in groups:
            group["params"] = [replica.shards.weights[p] for p in group["params"]]
    settings: dict[str, Any] = {
        "lr": training.lr,
        "betas": tuple(training.betas),
        "eps": training.eps,
        "fused": True,
    }
    optimizer = torch.optim.AdamW(groups, **settings)
    for updated in (replica.slices, replica.shards):
        if updated is not None:
            updated.attach(optimizer)
    return optimizer


def clip_factor(norm: Tensor, largest: float) -> Tensor | float:
    """Factor on gradients of this norm that makes it at most `largest` (0: no limit)."""
    if not largest:
        return 1.0
    if not norm.is_cuda:
        return min(1.0, largest / (norm.item() + 1e-6))
    return torch.clamp(largest / (norm + 1e-6), max=1.0)  # stays on the device: no waiting


def scale_gradients(gradients: list[Tensor], factor: Tensor | float) -> None:
    """Multiply gradients in place; nothing to do for 1."""
    if isinstance(factor, Tensor) or factor != 1.0:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]


class LossScaler:
    """fp16's dynamic loss scale (Micikevicius et al., arXiv:1710.03740, section 3.2).

    A gradient that overflows skips its step. From the plan's `hysteresis`-th one on since the scale
    last grew, each halves it; after `window` steps without it doubles.
    """

    def __init__(self, plan: LossScaleConfig) -> None:
        self.plan, self.scale = plan, plan.initial
        self._good, self._overflows = 0, 0

    def accept(self, norm: float) -> bool:
        """Whether a step with this norm of scaled gradients counts; adjusts the scale."""
        if not math.isfinite(norm):
            self._good, self._overflows = 0, self._overflows + 1
            if self._overflows >= self.plan.hysteresis:
                self.scale /= 2
            return False
        self._good += 1
        if self._good == self.plan.window:
            self.scale *= 2
            self._good = self._overflows = 0
        return True

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return {"scale": self.scale, "good": self._good, "overflows": self._overflows}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what `state` gave."""
        self.scale, self._good = float(state["scale"]), int(state["good"])
        self._overflows = int(state.get("overflows", 0))
