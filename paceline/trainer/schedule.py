"""Batch size and learning rate as functions of the step, so that a restart needs no state."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import torch

from paceline.trainer.config import LrScheduleConfig, TrainingConfig

LR_SCALE = "lr_scale"
"""Key of a parameter group: the factor of its learning rate."""


class BatchSizes:
    """Global batch of every step (from 0) with a ramp-up.

    `ramp_up` has (until, batch) pairs in rising order: a batch applies while fewer than `until`
    samples have been consumed. After the last pair the batch is `global_batch`.
    """

    def __init__(self, ramp_up: Sequence[Sequence[int]], global_batch: int) -> None:
        self._first_steps, self._samples_before, self._batches = [0], [0], [global_batch]
        step = samples = 0
        for until, batch in ramp_up:
            steps = max(0, -(-(until - samples) // batch))
            if steps:
                self._batches[-1:] = [batch, global_batch]
                step, samples = step + steps, samples + steps * batch
                self._first_steps.append(step)
                self._samples_before.append(samples)

    def batch(self, step: int) -> int:
        """Return the samples of a step over all ranks."""
        return self._batches[self._phase(step)]

    def samples_before(self, step: int) -> int:
        """Return the samples of all steps before `step`."""
        i = self._phase(step)
        return self._samples_before[i] + (step - self._first_steps[i]) * self._batches[i]

    def _phase(self, step: int) -> int:
        return bisect_right(self._first_steps, step) - 1


class LearningRate:
    """Learning rate of each step (from 0): linear warm-up, then decay to min_lr.

    A step that follows n steps (or samples) and adds b has the rate lr (n + b) / warmup while
    n < warmup, then min_lr + (lr - min_lr) f((n - warmup) / (decay - warmup)).
    """

    def __init__(self, training: TrainingConfig) -> None:
        self.max_lr, self.plan = training.lr, training.lr_schedule
        self._sizes = BatchSizes(training.ramp_up, training.global_batch)
        self._decay = self.plan.decay or self._progress(training.steps)

    def at(self, step: int) -> float:
        """Return the rate of a step (from 0)."""
        before, after = self._progress(step), self._progress(step + 1)
        if before < self.plan.warmup:
            return self.max_lr * min(1.0, after / self.plan.warmup)
        if self.plan.kind == "constant":
            return self.max_lr
        length = max(1, self._decay - self.plan.warmup)
        factor = decay_factor(self.plan, min(1.0, (before - self.plan.warmup) / length))
        return self.plan.min_lr + (self.max_lr - self.plan.min_lr) * factor

    def _progress(self, step: int) -> int:
        """Return the steps or samples before a step, in the schedule's unit."""
        return step if self.plan.unit == "steps" else self._sizes.samples_before(step)


def decay_factor(plan: LrScheduleConfig, progress: float) -> float:
    """Return the decay f(progress): 1 at progress 0, 0 at progress 1."""
    return 1.0 - progress if plan.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step, scaled per parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(LR_SCALE, 1.0)
