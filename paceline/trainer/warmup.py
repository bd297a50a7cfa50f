"""Steps on random samples before a clock starts, which leave nothing behind.

They pay for what only first steps do: libraries' workspaces, compiled code, the communicators'
connections. With a learning rate of 0 no weight moves, so none has to be copied; the optimizer's
state and what random numbers come next are put back.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from paceline.trainer.config import TrainerConfig
from paceline.trainer.data.batches import Loader, Sampler
from paceline.trainer.data.corpus import load_corpus, load_validation
from paceline.trainer.evaluation import Evaluator
from paceline.trainer.optim import LossScaler
from paceline.trainer.randomness import kept_randomness
from paceline.trainer.schedule import set_rate
from paceline.trainer.trainer import Trainer


def warm_up(trainer: Trainer, config: TrainerConfig, steps: int) -> float:
    """Train and evaluate so many steps on random samples, and forget them; seconds that it took.

    To be called before anything is trained or loaded: the optimizer's state ends empty.
    """
    began = time.perf_counter()
    replica, world = trainer.replica, trainer.world
    synthetic = replace(config, data=replace(config.data, source="synthetic", packing="packed"))
    corpus, mesh = load_corpus(synthetic), replica.mesh
    training = config.training
    sampler = Sampler(
        corpus.num_windows, training.global_batch, config.dp, training.seed, training.ramp_up
    )
    loader = Loader(corpus, sampler, synthetic, mesh, pin=world.device.type == "cuda")
    masked, scaler = trainer.masked, trainer.scaler
    with kept_randomness(world.device):
        try:
            trainer.masked = False
            trainer.scaler = LossScaler(training.loss_scale) if scaler is not None else None
            for _ in range(steps):
                batch, _ = loader.next()
                set_rate(trainer.optimizer, 0.0)
                trainer.step(batch.to(world.device))
            few = min(steps * config.num_microbatches, 8) * config.layout.micro_batch * config.dp
            if steps:
                Evaluator(
                    shortened(synthetic, few), replica, world, load_validation(synthetic)
                ).loss()
        finally:
            loader.close()
            trainer.masked, trainer.scaler = masked, scaler
    trainer.optimizer.state.clear()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - began


def shortened(config: TrainerConfig, samples: int) -> TrainerConfig:
    """The same with an evaluation of so many samples at most."""
    evaluation = config.training.evaluation
    assert evaluation is not None, "a timed run is evaluated"
    fewer = replace(evaluation, samples=min(evaluation.samples, samples))
    return replace(config, training=replace(config.training, evaluation=fewer))
