"""Saves and resumes trainings of one world size with the trainer's own code, one after the other.

Started as a program, once per rank: checkpoint_driver.py TASKS.json FOLDER. A task either trains
two steps, saves, and trains a third one while that is written, or resumes from another's checkpoint
to the last step. Rank 0 writes each one's losses and weights, put together from all ranks.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))

import torch
from driver import gathered, mesh_of, pieces
from pieces import join
from torch import distributed as dist

from paceline.trainer.config import parse_config
from paceline.trainer.config_checks import config_problems
from paceline.trainer.data.batches import Loader, Sampler
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.measure.clock import HostClock, StepClock, watch_waits
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.parallel.mesh import World, join_world
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.trainer import Trainer

SAVED_AFTER = 2


def run(task: dict[str, Any], world: World) -> dict[str, Any] | None:
    """Train one task in the current folder; on rank 0 the losses of its steps and the weights."""
    config = parse_config(task["settings"])
    assert not (problems := config_problems(config, world.size)), problems
    mesh, steps = mesh_of(config, world), StepClock(HostClock())
    replica = make_replica(config, world, mesh, steps)
    trainer = Trainer(config, replica, world, steps, EventLog("steps", world.rank))
    corpus, training = load_corpus(config), config.training
    done = trainer.restore(corpus.num_windows, nullcontext)
    assert trainer.checkpoints is not None
    sampler = Sampler(corpus.num_windows, training.global_batch, config.dp, training.seed)
    loader = Loader(corpus, sampler, config, mesh, pin=False, first=done)
    losses: list[float] = []
    for step in range(done + 1, training.steps + 1):
        losses.append(trainer.step(loader.next()[0])[0][0].item())
        if task["saves"] and step == SAVED_AFTER:
            trainer.checkpoints.save(step)
        elif task["saves"] and step > SAVED_AFTER:
            break
    trainer.finish_checkpoint()
    loader.close()
    held = {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "weights": pieces(replica, gradients=False),
    }
    ranks = gathered(held, world)
    if not ranks:
        return None
    whole = join(rank["weights"] for rank in ranks)
    apart = max(whole.apart.values())
    return {
        "done": done,
        "losses": torch.stack([rank["losses"] for rank in ranks]).mean(0),
        "weights": whole.tensors,
        "apart": apart,
    }


def main(tasks: list[dict[str, Any]], folder: Path) -> None:
    """Run the tasks, each in a folder of its name."""
    torch.set_num_threads(1)
    world = join_world("cpu")
    if world.size > 1:
        watch_waits(StepClock(HostClock()))
    for task in tasks:
        own = folder / task["name"]
        own.mkdir(exist_ok=True)
        os.chdir(own)
        result = run(task, world)
        if result is not None:
            torch.save(result, own / "result.pt")
    if world.size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
