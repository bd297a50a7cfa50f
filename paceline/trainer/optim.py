"""The optimizer, the clipping of gradients, and fp16's loss scale."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.trainer.config import TrainingConfig
from paceline.trainer.parallel.mesh import Axis
from paceline.trainer.replica.replica import Replica


def make_optimizer(
    replica: Replica, training: TrainingConfig, shard_state: Axis | None
) -> torch.optim.Optimizer:
    """Fused AdamW without weight decay on vectors, spread over `shard_state` (ZeRO 1)."""
    parameters = [p for _, p in replica.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {
        "lr": training.lr,
        "betas": tuple(training.betas),
        "eps": training.eps,
        "fused": True,
    }
    if shard_state is None:
        return torch.optim.AdamW(groups, **settings)
    # Its package compiles old optimizers on import: slow, and with deprecation warnings.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        groups,
        optimizer_class=torch.optim.AdamW,
        process_group=shard_state.group,
        parameters_as_bucket_view=True,
        **settings,
    )


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

    The scale halves when a gradient overflows, which skips that step, and doubles after
    `patience` steps without.
    """

    def __init__(self, scale: float = 65536.0, patience: int = 2000) -> None:
        self.scale, self.patience = scale, patience
        self._good = 0

    def accept(self, norm: float) -> bool:
        """Whether a step with this norm of scaled gradients counts; adjusts the scale."""
        if not math.isfinite(norm):
            self.scale, self._good = self.scale / 2, 0
            return False
        self._good += 1
        if self._good == self.patience:
            self.scale, self._good = self.scale * 2, 0
        return True

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return {"scale": self.scale, "good": self._good}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what `state` gave."""
        self.scale, self._good = float(state["scale"]), int(state["good"])
