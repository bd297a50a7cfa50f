"""What changes over a training by plan: the learning rate, and the batch while it ramps up."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from paceline.core.value import NonNegativeInt, PositiveInt, Value

Decay = Literal["constant", "linear", "cosine"]
ScheduleUnit = Literal["steps", "samples"]


class LrSchedule(Value):
    """How the learning rate rises to `training.lr` and falls from there; a step's alone decides.

    With n steps (or samples) behind it a step of b takes lr x min(1, (n + b) / warmup) while
    n < warmup, then min_lr + (lr - min_lr) x f((n - warmup) / (decay - warmup)) with f(x) = 1 - x
    for linear, (1 + cos(pi x)) / 2 for cosine, and min_lr from `decay` on.
    """

    kind: Decay = "constant"
    """What follows the warm-up."""
    warmup: NonNegativeInt = 0
    """Length of the linear warm-up."""
    decay: PositiveInt | None = None
    """Where min_lr is reached, the warm-up included; None is the end of training."""
    min_lr: NonNegativeFloat = 0.0
    unit: ScheduleUnit = "steps"
    """What `warmup` and `decay` count."""

    @model_validator(mode="after")
    def _falls_after_rising(self) -> Self:
        if self.decay is not None and self.decay <= self.warmup:
            raise ValueError(f"decay {self.decay} must be beyond warmup {self.warmup}")
        if self.kind == "constant" and (self.decay is not None or self.min_lr):
            raise ValueError(
                "a constant rate has neither decay nor min_lr; {kind: constant} alone keeps it so"
            )
        return self


class LossScale(Value):
    """fp16's dynamic loss scale; an overflow skips its step, and dtypes besides fp16 need none."""

    initial: PositiveFloat = 65536.0
    window: PositiveInt = 2000
    """Good steps in a row after which it doubles."""
    hysteresis: PositiveInt = 1
    """Which overflow since it last grew halves it for the first time; all after it do as well."""


class RampUp(Value):
    """A batch that grows from `start` by `increment` over the first `samples`, as Megatron's
    `--rampup-batch-size` lets it."""

    start: PositiveInt
    increment: PositiveInt
    samples: PositiveInt

    def sizes(self, global_batch: int) -> list[tuple[int, int]]:
        """(until, batch) pairs: the batch while fewer than `until` samples are behind.

        start + increment x int(consumed x n / samples) with n = (global_batch - start) / increment
        (update of RampupBatchSizeNumMicroBatches in Megatron-DeepSpeed's microbatches.py).
        """
        n = (global_batch - self.start) // self.increment
        return [
            (-(-(k + 1) * self.samples // n), self.start + k * self.increment) for k in range(n)
        ]

    def problem(self, global_batch: int) -> str | None:
        """Why the batch cannot grow to `global_batch` so, None when it can."""
        rest = global_batch - self.start
        if rest > 0 and rest % self.increment == 0:
            return None
        return (
            f"training.ramp_up: from {self.start} in steps of {self.increment} the batch never "
            f"becomes global_batch {global_batch}; it must be above start by a multiple of "
            "increment"
        )
