"""The learning rate of every step, from the step's number alone: a restart needs no state."""

from __future__ import annotations

import math

import torch

from paceline.trainer.config import LrScheduleConfig, TrainingConfig
from paceline.trainer.rampup import BatchSizes


class LearningRate:
    """The rate of each step (from 0): a linear warm-up, then as `kind` says down to min_lr.

    A step with n steps or samples behind it and b of its own takes lr (n + b) / warmup while
    n < warmup, then min_lr + (lr - min_lr) f((n - warmup) / (decay - warmup)).
    """

    def __init__(self, training: TrainingConfig) -> None:
        self.highest, self.plan = training.lr, training.lr_schedule
        self._sizes = BatchSizes(training.ramp_up, training.global_batch)
        self._decay = self.plan.decay or self._behind(training.steps)

    def at(self, step: int) -> float:
        """The rate of a step (from 0)."""
        behind, after = self._behind(step), self._behind(step + 1)
        if behind < self.plan.warmup:
            return self.highest * min(1.0, after / self.plan.warmup)
        if self.plan.kind == "constant":
            return self.highest
        length = max(1, self._decay - self.plan.warmup)
        left = remaining(self.plan, min(1.0, (behind - self.plan.warmup) / length))
        return self.plan.min_lr + (self.highest - self.plan.min_lr) * left

    def _behind(self, step: int) -> int:
        """Steps or samples before a step."""
        return step if self.plan.unit == "steps" else self._sizes.consumed(step)


def remaining(plan: LrScheduleConfig, done: float) -> float:
    """How much of the fall from lr to min_lr is left when the part `done` of the way is behind."""
    return 1.0 - done if plan.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Have the next step taken with this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
