"""Evaluation on held-out samples, which are the same in every layout.

Each data-parallel rank evaluates the same number of micro-batches, padded with samples of weight 0.
The result is the mean over all valid targets, or the mean over samples of their means; for a
diffusion transformer it is the mean over its evaluation times.

`Quality` decides when a training is evaluated and whether the result ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from paceline.trainer.config import ConfigError, EvaluationConfig, TrainerConfig
from paceline.trainer.data.batches import LocalBatch, by_argument
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
    """Evaluates all replicas together; every rank must call it."""

    def __init__(
        self, config: TrainerConfig, replica: Replica, world: World, corpus: Corpus
    ) -> None:
        assert config.training.evaluation is not None, "evaluation is configured"
        self.replica, self.world, self.corpus = replica, world, corpus
        self.num_samples = config.training.evaluation.samples
        mean = config.training.evaluation.mean
        self.weights = sample_weights(corpus, self.num_samples, mean)
        self.unequal_weights = mean == "samples" or isinstance(corpus, ValidationLatents)
        self.kind, self.micro_batch = config.model.kind, config.layout.micro_batch
        self.num_microbatches = config.num_microbatches
        """Micro-batches per pass through the pipeline."""

    def loss(self) -> float:
        """Return the mean loss, equal on every rank; NaN without valid targets."""
        mesh = self.replica.mesh
        total, count = self.replica.zero(), 0.0
        for batch, weights, total_weight in self._batches():
            on_device = weights.to(self.world.device) if self.unequal_weights else None
            total += self.replica.evaluate(batch.to(self.world.device), on_device)
            count += total_weight
        both = torch.stack([total, total.new_tensor(count)])
        loss, count = all_reduce(all_reduce(both, mesh.shard), mesh.replicate).unbind()
        mean = all_reduce(loss.clone(), mesh.pp) / count
        if self.world.size > 1:
            dist.broadcast(mean, src=0)
        return mean.item()

    def _batches(self) -> Iterator[tuple[LocalBatch, Tensor, float]]:
        """Yield (micro-batches, sample weights, total weight) of this rank."""
        cp, weights = self.replica.mesh.cp, self.weights
        indices, size = self._sample_indices(), self.micro_batch * self.num_microbatches
        for chunk in (indices[i : i + size] for i in range(0, len(indices), size)):
            valid = torch.tensor([n < self.num_samples for n in chunk])
            # Padding is sample 0 with weight 0.
            samples = [n if n < self.num_samples else 0 for n in chunk]
            counts = weights[samples] * valid
            fields = by_argument(self.corpus.collate(samples, cp), self.kind)
            targets = fields["targets"]
            if isinstance(self.corpus, ValidationLatents):
                total_weight = counts.sum().item() * targets[0].numel()
            else:
                targets = targets.masked_fill(~valid.unsqueeze(1), IGNORE_INDEX)
                total_weight = ((targets != IGNORE_INDEX).sum(1) * counts).sum().item()
            # (samples, ...) -> (M, B, ...)
            fields |= {"targets": targets}
            split = {n: x.unflatten(0, (-1, self.micro_batch)) for n, x in fields.items()}
            inputs, targets = split.pop("inputs"), split.pop("targets")
            batch = LocalBatch(inputs, targets, int(total_weight), split)
            yield batch, counts.unflatten(0, (-1, self.micro_batch)), total_weight

    def _sample_indices(self) -> range:
        """Return this rank's sample indices; those beyond the last sample are padding."""
        dp = self.replica.mesh.dp
        per_rank = -(-self.num_samples // (dp.size * self.micro_batch)) * self.micro_batch
        return range(dp.index * per_rank, (dp.index + 1) * per_rank)


def sample_weights(corpus: Corpus, num_samples: int, mean: str = "targets") -> Tensor:
    """Return (num_samples,) weights of each sample's targets.

    For latents, all evaluation times have equal total weight. Raise ConfigError for a sample
    without valid targets if the mean is over samples.
    """
    if not isinstance(corpus, ValidationLatents):
        if mean == "targets":
            return torch.ones(num_samples, dtype=torch.float64)
        valid_targets = [
            int((corpus.collate([i], ALONE)[1] != IGNORE_INDEX).sum()) for i in range(num_samples)
        ]
        if 0 in valid_targets:
            raise ConfigError(
                f"training.evaluation: held-out sample {valid_targets.index(0)} has no valid "
                "target, so the mean over samples is undefined; correct its loss_mask"
            )
        return 1 / torch.tensor(valid_targets, dtype=torch.float64)
    times = corpus.eighths[:num_samples]
    counts = torch.bincount(times, minlength=TIMES).double()
    return num_samples / ((counts > 0).sum() * counts[times])


@dataclass(frozen=True)
class EvaluationPlan:
    """The steps (from 1) after which a training is evaluated."""

    evaluation: EvaluationConfig
    sizes: BatchSizes
    global_batch: int

    @property
    def interval(self) -> int:
        """Samples between two evaluations, a multiple of the global batch."""
        return -(-self.evaluation.every_samples // self.global_batch) * self.global_batch

    def samples(self, step: int) -> int:
        """Return the number of training samples up to a step."""
        return self.sizes.samples_before(step)

    def due(self, step: int) -> bool:
        """Return whether an evaluation follows a step."""
        number = self.samples(step) // self.interval
        passed = number > self.samples(step - 1) // self.interval
        return passed and number > self.evaluation.skip_first


def evaluation_plan(config: TrainerConfig) -> EvaluationPlan | None:
    """Return the steps at which a training is evaluated; None without evaluations."""
    training = config.training
    if training.evaluation is None:
        return None
    sizes = BatchSizes(training.ramp_up, training.global_batch)
    return EvaluationPlan(training.evaluation, sizes, training.global_batch)


class Quality:
    """Evaluates a training at the planned steps and records the results."""

    def __init__(
        self,
        plan: EvaluationPlan,
        loss: Callable[[], float],
        has_target: bool,
        events: EventLog,
        timed_run: MlperfRun,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Set `has_target` unless the data is random, where no loss is meaningful."""
        self.clock = clock
        self.plan, self.loss, self.events, self.timed_run = plan, loss, events, timed_run
        self.has_target = has_target
        self.reached = False
        self._block_start = self.clock()

    def evaluate(self, step: int) -> bool:
        """Evaluate after a step; return whether the target is reached."""
        start, samples, evaluation = self.clock(), self.plan.samples(step), self.plan.evaluation
        self.timed_run.end_block(step, samples, start - self._block_start)
        self.timed_run.begin_evaluation(step, samples)
        loss = self.loss()
        seconds = self.clock() - start
        target = evaluation.target
        self.reached = self.has_target and target is not None and loss <= target
        self.timed_run.end_evaluation(step, samples, loss, seconds)
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
            self.timed_run.begin_block(step, samples)
        self._block_start = self.clock()
        return self.reached

    def stop(self, step: int) -> bool | None:
        """Record the end of training; return whether the target was reached, None without one."""
        samples = self.plan.samples(step)
        if not self.reached:
            self.timed_run.end_block(step, samples, self.clock() - self._block_start)
        self.timed_run.stop(self.reached, step, samples)
        return None if self.plan.evaluation.target is None else self.reached
