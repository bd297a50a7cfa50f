"""One step over a token file with a mask, evaluations before it, in several layouts of one world.

Started as a program, once per rank: mask_driver.py CASES.json FILE, where CASES.json holds the
content of trainer.json by case. Rank 0 writes what all ranks hold together: losses, gradients
before they are clipped, evaluations.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor
from torch import distributed as dist

from paceline.trainer.config import Mean, TrainerConfig, parse_config
from paceline.trainer.config_checks import config_problems
from paceline.trainer.data.batches import Loader, LocalBatch, sampler_of
from paceline.trainer.data.corpus import load_corpus, load_validation
from paceline.trainer.evaluation import Evaluator
from paceline.trainer.measure.clock import HostClock, StepClock, watch_waits
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.parallel.mesh import World, join_world, make_mesh
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.replica.replica import Replica
from paceline.trainer.trainer import Trainer
from tests.numerics.pieces import TensorShard, join


def run(config: TrainerConfig, world: World) -> dict[str, Any]:
    """What this rank holds after one step."""
    assert not (problems := config_problems(config, world.size)), problems
    mesh, steps = make_mesh(world, config.layout, config.dp), StepClock(HostClock())
    replica, corpus = make_replica(config, world, mesh, steps), load_corpus(config)
    trainer = Trainer(config, replica, world, steps, EventLog(".", world.rank))
    trainer.masked = corpus.masked
    evaluations = {mean: evaluated(config, replica, world, mean) for mean in get_args(Mean)}
    gradients: dict[str, TensorShard | None] = {}
    train = replica.train

    def watched(batch: LocalBatch, scale: float) -> Tensor:
        loss = train(batch, scale)
        for name, parameter in replica.named_parameters():
            dim = replica.tp_plan[name].shard_dim
            gradients[name] = TensorShard.of(parameter.grad, dim, mesh.tp, mesh.shard)
        return loss

    replica.train = watched  # type: ignore[method-assign]
    loader = Loader(corpus, sampler_of(config, corpus.num_windows), config, mesh, pin=False)
    (loss, _), _ = trainer.step(loader.next()[0])
    loader.close()
    return {"loss": loss.item(), "gradients": gradients, "evaluations": evaluations}


def evaluated(config: TrainerConfig, replica: Replica, world: World, mean: str) -> float:
    """The held-out loss."""
    evaluation = config.training.evaluation
    assert evaluation is not None
    asked = replace(config.training, evaluation=replace(evaluation, mean=mean))
    asked_of = replace(config, training=asked)
    return Evaluator(asked_of, replica, world, load_validation(asked_of)).loss()


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of the ranks' losses, whole gradients, and evaluations, which all ranks agree on."""
    assert all(rank["evaluations"] == ranks[0]["evaluations"] for rank in ranks)
    return {
        "loss": sum(rank["loss"] for rank in ranks) / len(ranks),
        "gradients": join(rank["gradients"] for rank in ranks).tensors,
        "evaluations": ranks[0]["evaluations"],
    }


def main(cases: dict[str, Any], file: Path) -> None:
    """Train the cases one after the other."""
    torch.set_num_threads(1)
    world, found = join_world("cpu"), {}
    if world.size > 1:
        watch_waits(StepClock(HostClock()))
    for name, raw in cases.items():
        ranks: list[Any] = [run(parse_config(raw), world)]
        if world.size > 1:
            held, ranks = ranks[0], [None] * world.size
            dist.all_gather_object(ranks, held)
        found[name] = together(ranks)
    if world.rank == 0:
        torch.save(found, file)
    if world.size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
