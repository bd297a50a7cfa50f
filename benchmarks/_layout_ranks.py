"""One rank of a world that trains a model in many layouts, each step next to a single process's.

    _layout_ranks.py QUESTION.json ANSWER.json

The question is {reference, layouts, rounds, threads, threads_of_a_rank}: trainer.json for one
process and for each layout, how often all of them are gone through, and the threads of the single
process and of a rank. In each round rank 0 alone takes a step of the reference while the others
wait idly; then all take a step of the layout. The answer lists, for every layout and round, this
rank's [reference, layout] figures.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from paceline.trainer.config import TrainerConfig, parse_config
from paceline.trainer.data.batches import LocalBatch
from paceline.trainer.measure.clock import HostClock, StepClock, watch_waits
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.measure.machine import keep_freed_memory
from paceline.trainer.parallel.mesh import World, join_world, make_mesh
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.trainer import Trainer

ALONE = World(0, 0, 1, torch.device("cpu"), None)
WARMUP = 2
shared_mesh = cache(make_mesh)
"""Layouts of the same sizes share their groups."""


def trainer_of(raw: dict[str, Any], world: World, steps: StepClock, folder: Path) -> Trainer:
    """A training that is ready for its first step."""
    config = parse_config(raw)
    sizes = replace(
        config.layout,
        vp=1,
        micro_batch=1,
        schedule="",
        cp_exchange="",
        zero_stage=2 if config.layout.zero_stage >= 2 else 0,
        sequence_parallel=False,
    )
    replica = make_replica(config, world, shared_mesh(world, sizes, config.dp), steps)
    return Trainer(config, replica, world, steps, EventLog(str(folder), world.rank))


def batch_unit(config: TrainerConfig) -> LocalBatch:
    """Random tokens in this rank's shape."""
    tokens = config.training.seq_len // config.layout.cp
    shape = (config.num_microbatches, config.layout.micro_batch, tokens)
    ids = torch.randint(0, config.model.vocab_size, (2, *shape))
    return LocalBatch(ids[0], ids[1], ids[0].numel())


def time_step(step: Callable[[], Any], steps: StepClock) -> dict[str, float]:
    """Seconds of one step: by the clock, blocked in collectives, and of processor time.

    `own_s` is the processor time of the thread that trains; the rest is that of other threads,
    which move and add what is exchanged.
    """
    steps.start()
    begin, cpu, own_s = time.perf_counter(), time.process_time(), time.thread_time()
    step()
    took = time.perf_counter() - begin
    _, wait_s = steps.read(steps.lap())
    return {
        "step_time_s": took,
        "comm_wait_s": wait_s,
        "cpu_s": time.process_time() - cpu,
        "own_s": time.thread_time() - own_s,
    }


def main(question: Path, into: Path) -> None:
    """Go through all layouts again and again in one world."""
    order = json.loads(question.read_text())
    keep_freed_memory()
    torch.set_num_threads(order["threads_of_a_rank"])
    world, steps = join_world("cpu"), StepClock(HostClock())
    if world.size > 1:
        watch_waits(steps)
    trainers = [trainer_of(raw, world, steps, into.parent) for raw in order["layouts"]]
    steps_of = [stepper(trainer) for trainer in trainers]
    alone: Callable[[], Tensor] | None = None
    if world.rank == 0:
        alone = stepper(trainer_of(order["reference"], ALONE, steps, into.parent))
    gc.collect()
    gc.freeze()
    gc.disable()
    by_layout: list[list[Any]] = [[] for _ in trainers]
    for turn in range(WARMUP + order["rounds"]):
        for figures, step in zip(by_layout, steps_of, strict=True):
            reference = None
            if alone is not None:
                torch.set_num_threads(order["threads"])
                reference = time_step(alone, steps)
                torch.set_num_threads(order["threads_of_a_rank"])
            together(world)
            figure = time_step(step, steps)
            together(world)
            if turn >= WARMUP:
                figures.append([reference, figure])
    into.with_name(f"{world.rank}-{into.name}").write_text(json.dumps(by_layout))
    together(world)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a normal exit


def stepper(trainer: Trainer) -> Callable[[], Any]:
    """Takes one step on the same batch again and again."""
    batch = batch_unit(trainer.config)
    return lambda: trainer.step(batch)[0].tolist()


def together(world: World) -> None:
    """Return when all ranks have come here."""
    if world.size > 1:
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
