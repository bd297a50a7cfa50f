"""When a training is evaluated, what is written about it, and whether that ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.trainer.config import EvaluationConfig, TrainerConfig
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.measure.mllog import MlperfRun
from paceline.trainer.schedule import BatchSizes


@dataclass(frozen=True)
class EvaluationPlan:
    """After which steps (from 1) a training is evaluated."""

    evaluation: EvaluationConfig
    sizes: BatchSizes
    global_batch: int

    @property
    def interval(self) -> int:
        """Samples between two evaluations: whole batches."""
        return -(-self.evaluation.every_samples // self.global_batch) * self.global_batch

    def samples(self, step: int) -> int:
        """Samples that the training has seen after a step."""
        return self.sizes.consumed(step)

    def due(self, step: int) -> bool:
        """Whether there is an evaluation after a step."""
        number = self.samples(step) // self.interval
        passed = number > self.samples(step - 1) // self.interval
        return passed and number > self.evaluation.skip_first


def evaluation_plan(config: TrainerConfig) -> EvaluationPlan | None:
    """When a training is evaluated; None when it never is."""
    training = config.training
    if training.evaluation is None:
        return None
    sizes = BatchSizes(training.ramp_up, training.global_batch)
    return EvaluationPlan(training.evaluation, sizes, training.global_batch)


class Quality:
    """Evaluates a training at the prescribed steps and keeps its records."""

    def __init__(
        self,
        plan: EvaluationPlan,
        loss: Callable[[], float],
        judged: bool,
        events: EventLog,
        timed: MlperfRun,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`judged` says that a loss can reach the target: on random samples none means anything."""
        self.clock = clock
        self.plan, self.loss, self.events, self.timed = plan, loss, events, timed
        self.judged = judged
        self.reached = False
        self._block_start = self.clock()

    def evaluate(self, step: int) -> bool:
        """Evaluate after a step; whether the target is reached."""
        began, samples, evaluation = self.clock(), self.plan.samples(step), self.plan.evaluation
        self.timed.end_block(step, samples, began - self._block_start)
        self.timed.begin_evaluation(step, samples)
        loss = self.loss()
        seconds = self.clock() - began
        target = evaluation.target
        self.reached = self.judged and target is not None and loss <= target
        self.timed.end_evaluation(step, samples, loss, seconds)
        self.events.write(
            "eval",
            step=step,
            samples=samples,
            num_samples=evaluation.samples,
            loss=loss,
            target=target,
            reached=self.reached,
            eval_time_s=seconds,
        )
        if not self.reached:
            self.timed.begin_block(step, samples)
        self._block_start = self.clock()
        return self.reached

    def stop(self, step: int) -> bool | None:
        """The training has ended after a step; whether it reached its target, None without one."""
        samples = self.plan.samples(step)
        if not self.reached:
            self.timed.end_block(step, samples, self.clock() - self._block_start)
        self.timed.stop(self.reached, step, samples)
        return None if self.plan.evaluation.target is None else self.reached
