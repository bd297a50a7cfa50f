"""Trains all cases of one world size with the trainer's own code and keeps what came out.

Started as a program, once per rank: driver.py CASES.json FOLDER. Rank 0 writes one file a case:
losses, gradient norms, every parameter's gradient of the first step and weight after the last.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "paceline" / "native"))

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

import parallel
from batches import Loader, Sampler
from clock import HostClock, StepClock, watch_waits
from config import parse_config
from corpus import load_corpus
from record import EventLog
from train import Trainer, make_replica


class WatchedTrainer(Trainer):
    """The trainer, with the first step's gradients kept before they are clipped."""

    first_gradients: dict[str, Tensor] | None = None

    def _update(self, loss_scale: float) -> tuple[Tensor, bool]:
        if self.first_gradients is None:
            self.first_gradients = {
                name: whole(p.grad) for name, p in self.replica.model.named_parameters()
            }
        return super()._update(loss_scale)


def whole(tensor: Tensor | None) -> Tensor:
    """A copy of a tensor with all its shards."""
    assert tensor is not None
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def run(case: dict[str, Any], world: parallel.World, folder: Path) -> dict[str, Any]:
    """Train one case; what all ranks agree on."""
    config = parse_config(case["settings"])
    torch.set_float32_matmul_precision(config.training.matmul_precision)
    steps = StepClock(HostClock())
    replica = make_replica(config, world, steps)
    trainer = WatchedTrainer(config, replica, world, steps, EventLog(str(folder), world.rank))
    corpus = load_corpus(config)
    training = config.training
    sampler = Sampler(corpus.num_windows, training.global_batch, config.dp, training.seed)
    loader = Loader(corpus, sampler, config, world.rank, pin=False)
    figures = [trainer.step(loader.next()[0])[0].tolist() for _ in range(training.steps)]
    loader.close()
    return {
        "figures": averaged_losses(torch.tensor(figures, dtype=torch.float64)),
        "gradients": trainer.first_gradients,
        "weights": {name: whole(p) for name, p in replica.model.named_parameters()},
    }


def averaged_losses(figures: Tensor) -> Tensor:
    """(steps, 2) figures whose losses, a rank's own, become the mean over equal ranks."""
    if dist.is_initialized():
        losses = figures[:, 0].contiguous()
        dist.all_reduce(losses, op=dist.ReduceOp.AVG)
        figures[:, 0] = losses
    return figures


def break_something(fault: str, rank: int) -> None:
    """Put in the fault that a comparison must find."""
    if fault == "unreduced bucket":
        parallel.average_bucket = unreduced  # type: ignore[assignment]
    elif fault and rank == 1:
        train = parallel.Replica.train

        def scaled(self: Any, inputs: Tensor, targets: Tensor, scale: float, last: bool) -> Tensor:
            return train(self, inputs, targets, scale * 1.001, last)

        parallel.Replica.train = scaled  # type: ignore[method-assign]


def unreduced(steps: StepClock, bucket: Any) -> torch.futures.Future[Tensor]:
    """A communication hook that forgets to communicate."""
    steps.begin_wait()
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def main(cases: list[dict[str, Any]], folder: Path) -> None:
    """Train the cases one after the other in one world."""
    torch.set_num_threads(1)
    world = parallel.join_world("cpu")
    if world.size > 1:
        watch_waits(StepClock(HostClock()))
    sound = parallel.average_bucket, parallel.Replica.train
    for case in cases:
        break_something(case["fault"], world.rank)
        result = run(case, world, folder)
        parallel.average_bucket, parallel.Replica.train = sound  # type: ignore[method-assign]
        if world.rank == 0:
            torch.save(result, folder / f"{case['name']}.pt")
    if world.size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
