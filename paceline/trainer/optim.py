"""The optimizer, gradient clipping and the fp16 loss scale."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.trainer.config import LossScaleConfig, TrainingConfig, is_adapter
from paceline.trainer.parallel.mesh import MeshAxis
from paceline.trainer.replica.replica import Replica
from paceline.trainer.replica.weight_slices import LocalShards, WeightSlices
from paceline.trainer.schedule import LR_SCALE


def make_optimizer(
    replica: Replica,
    training: TrainingConfig,
    shard_state: MeshAxis | None,
    adapter_lr: float | None,
) -> torch.optim.Optimizer:
    """Return fused AdamW without weight decay on vectors, sharded over `shard_state` (ZeRO 1).

    The state of experts is sharded over the ranks that hold the same ones. Their stacked biases are
    vectors.

    LoRA adapters with their own learning rate are a separate parameter group.
    """
    parameters = [(name, p) for name, p in replica.named_parameters() if p.requires_grad]
    separate = {name for name, _ in parameters if adapter_lr is not None and is_adapter(name)}
    others = [(name, p) for name, p in parameters if name not in separate]
    adapters = [p for name, p in parameters if name in separate]
    decay, lr_scale = training.weight_decay, (adapter_lr or training.lr) / training.lr
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in others if _is_matrix(name, p)], "weight_decay": decay},
        {"params": [p for name, p in others if not _is_matrix(name, p)], "weight_decay": 0.0},
        {"params": adapters, "weight_decay": decay, LR_SCALE: lr_scale},
    ]
    groups = [group for group in groups if group["params"]]
    if shard_state is not None:
        dense = (p for name, p in parameters if name not in replica.experts)
        experts = (p for name, p in parameters if name in replica.experts)
        replica.slices = WeightSlices((dense, shard_state), (experts, replica.mesh.expert_data))
        slices = replica.slices.slices
        for group in groups:
            group["params"] = [slices[p].weight for p in group["params"] if p in slices]
    elif replica.sharded:
        replica.shards = LocalShards(p for _, p in parameters)
        for group in groups:
            group["params"] = [replica.shards.weights[p] for p in group["params"]]
    settings: dict[str, Any] = {
        "lr": training.lr,
        "betas": tuple(training.betas),
        "eps": training.eps,
        "fused": True,
    }
    optimizer = torch.optim.AdamW(groups, **settings)
    for weights in (replica.slices, replica.shards):
        if weights is not None:
            weights.attach(optimizer)
    return optimizer


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim > 1 and not name.endswith("_bias")


def clip_factor(norm: Tensor, max_norm: float) -> Tensor | float:
    """Return the factor that clips gradients of this norm to `max_norm` (0: no limit)."""
    if not max_norm:
        return 1.0
    if not norm.is_cuda:
        return min(1.0, max_norm / (norm.item() + 1e-6))
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # on the device, without synchronizing


def scale_gradients(gradients: list[Tensor], factor: Tensor | float) -> None:
    """Multiply gradients in place."""
    if isinstance(factor, Tensor) or factor != 1.0:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]


class LossScaler:
    """Dynamic loss scale of fp16 (Micikevicius et al., arXiv:1710.03740, section 3.2).

    A step whose gradient overflows is skipped. After `hysteresis` overflows since the scale last
    grew, each one halves it; `window` steps without overflow double it.
    """

    def __init__(self, plan: LossScaleConfig) -> None:
        self.plan, self.scale = plan, plan.initial
        self._good, self._overflows = 0, 0

    def accept(self, norm: float) -> bool:
        """Adjust the scale; return whether to apply a step with this norm of scaled gradients."""
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
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "good": self._good, "overflows": self._overflows}

    def restore(self, state: dict[str, float]) -> None:
        """Restore the state that `state` returned."""
        self.scale, self._good = float(state["scale"]), int(state["good"])
        self._overflows = int(state.get("overflows", 0))
