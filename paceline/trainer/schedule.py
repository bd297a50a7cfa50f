"""Batch size and learning rate of every step, from its number alone: a restart needs no state."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import torch

from paceline.trainer.config import LrScheduleConfig, TrainingConfig

RATE_TIMES = "rate_times"
"""Key of a parameter group: its learning rate over the schedule's."""


class BatchSizes:
    """The global batch of every step (from 0) while it ramps up, and the samples before it.

    `ramp_up` holds (until, batch) pairs in rising order: a batch is taken while fewer than `until`
    samples are behind; after the last pair it is `global_batch`.
    """

    def __init__(self, ramp_up: Sequence[Sequence[int]], global_batch: int) -> None:
        self._first_steps, self._behind, self._batches = [0], [0], [global_batch]
        step = behind = 0
        for until, batch in ramp_up:
            steps = max(0, -(-(until - behind) // batch))
            if steps:
                self._batches[-1:] = [batch, global_batch]
                step, behind = step + steps, behind + steps * batch
                self._first_steps.append(step)
                self._behind.append(behind)

    def batch(self, step: int) -> int:
        """Samples of a step over all ranks."""
        return self._batches[self._stretch(step)]

    def consumed(self, step: int) -> int:
        """Samples of all steps before one."""
        i = self._stretch(step)
        return self._behind[i] + (step - self._first_steps[i]) * self._batches[i]

    def _stretch(self, step: int) -> int:
        return bisect_right(self._first_steps, step) - 1


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
    """Have the next step taken with this learning rate, by a group as many times as it says."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE_TIMES, 1.0)
