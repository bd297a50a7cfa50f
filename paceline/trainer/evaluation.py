"""Trying a model on samples that it never trains on, in every layout the same ones.

Each data-parallel rank takes as many micro-batches as the others, filled up with samples that count
nothing. The result is the mean over all targets that count, or over samples of the mean over
theirs; for a diffusion transformer the mean over the times at which its samples are tried.

`Quality` says when a training is evaluated, and whether the result ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from paceline.trainer.config import ConfigError, EvaluationConfig, TrainerConfig
from paceline.trainer.data.batches import LocalBatch
from paceline.trainer.data.corpus import Corpus
from paceline.trainer.data.latents import TIMES, ValidationLatents
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.measure.mllog import MlperfRun
from paceline.trainer.model.loss import IGNORE_INDEX
from paceline.trainer.parallel.collectives import all_reduce
from paceline.trainer.parallel.mesh import ALONE, World
from paceline.trainer.replica.replica import Replica
from paceline.trainer.schedule import BatchSizes


class Evaluator:
    """Evaluates a replica together with all others; every rank must call it."""

    def __init__(
        self, config: TrainerConfig, replica: Replica, world: World, corpus: Corpus
    ) -> None:
        assert config.training.evaluation is not None, "there is nothing to evaluate"
        self.replica, self.world, self.corpus = replica, world, corpus
        self.num_samples = config.training.evaluation.samples
        mean = config.training.evaluation.mean
        self.weights = sample_weights(corpus, self.num_samples, mean)
        self.weighs = mean == "samples" or isinstance(corpus, ValidationLatents)
        """Whether samples count differently, and the loss has to know."""
        self.micro_batch = config.layout.micro_batch
        self.at_once = config.num_microbatches
        """Micro-batches that a pipeline takes in one go."""

    def loss(self) -> float:
        """The mean loss, the same number on every rank; NaN when nothing counts."""
        mesh = self.replica.mesh
        total, count = self.replica.zero(), 0.0
        for batch, weights, counted in self._batches():
            there = weights.to(self.world.device) if self.weighs else None
            total += self.replica.evaluate(batch.to(self.world.device), there)
            count += counted
        both = torch.stack([total, total.new_tensor(count)])
        loss, count = all_reduce(all_reduce(both, mesh.shard), mesh.replicate).unbind()
        mean = all_reduce(loss.clone(), mesh.pp) / count
        if self.world.size > 1:
            dist.broadcast(mean, src=0)
        return mean.item()

    def _batches(self) -> Iterator[tuple[LocalBatch, Tensor, float]]:
        """(micro-batches, what each sample counts, what all that counts is worth) of this rank."""
        cp, weights = self.replica.mesh.cp, self.weights
        mine, size = self._numbers(), self.micro_batch * self.at_once
        for numbers in (mine[i : i + size] for i in range(0, len(mine), size)):
            real = torch.tensor([n < self.num_samples for n in numbers])
            stand_in = [n if n < self.num_samples else 0 for n in numbers]
            counts = weights[stand_in] * real
            inputs, targets, *extras = self.corpus.collate(stand_in, cp)
            if isinstance(self.corpus, ValidationLatents):
                counted = counts.sum().item() * targets[0].numel()
            else:
                targets = targets.masked_fill(~real.unsqueeze(1), IGNORE_INDEX)
                counted = ((targets != IGNORE_INDEX).sum(1) * counts).sum().item()
            cut = [x.unflatten(0, (-1, self.micro_batch)) for x in (inputs, targets, *extras)]
            batch = LocalBatch(cut[0], cut[1], int(counted), tuple(cut[2:]))
            yield batch, counts.unflatten(0, (-1, self.micro_batch)), counted

    def _numbers(self) -> range:
        """This rank's samples; numbers beyond the last one stand for none."""
        dp = self.replica.mesh.dp
        each = -(-self.num_samples // (dp.size * self.micro_batch)) * self.micro_batch
        return range(dp.index * each, (dp.index + 1) * each)


def sample_weights(corpus: Corpus, num_samples: int, mean: str = "targets") -> Tensor:
    """(num_samples,) what each target of a sample counts.

    Of latents, at every time that is tried as much as at any other. Raises ConfigError for a sample
    without a target that counts where the mean is over samples.
    """
    if not isinstance(corpus, ValidationLatents):
        if mean == "targets":
            return torch.ones(num_samples, dtype=torch.float64)
        counted = [
            int((corpus.collate([i], ALONE)[1] != IGNORE_INDEX).sum()) for i in range(num_samples)
        ]
        if 0 in counted:
            raise ConfigError(
                f"training.evaluation: no target of held-out sample {counted.index(0)} counts, "
                "so there is no mean over samples; see its loss_mask"
            )
        return 1 / torch.tensor(counted, dtype=torch.float64)
    times = corpus.eighths[:num_samples]
    counts = torch.bincount(times, minlength=TIMES).double()
    return num_samples / ((counts > 0).sum() * counts[times])


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
