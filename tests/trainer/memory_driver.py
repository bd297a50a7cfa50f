"""Trains some layouts for a few steps in one world and keeps what their watch told.

Started as a program, once per rank: memory_driver.py CASES.json FOLDER. Every rank writes one file:
for each case its memory record, the step times and which of the steps was watched.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from paceline.trainer.config import parse_config
from paceline.trainer.data.batches import Loader, Sampler
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.measure.clock import HostClock, StepClock
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.measure.memory import MemoryWatch
from paceline.trainer.parallel.mesh import World, join_world, make_mesh
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.trainer import Trainer


def run(settings: dict[str, Any], world: World, folder: Path) -> dict[str, Any]:
    """What one training says of its memory."""
    config = parse_config(settings)
    memory = MemoryWatch(world.device)
    mesh, steps = make_mesh(world, config.layout, config.dp), StepClock(HostClock())
    replica = make_replica(config, world, mesh, steps)
    events = EventLog(str(folder), world.rank)
    trainer = Trainer(config, replica, world, steps, events, memory)
    corpus, training = load_corpus(config), config.training
    sampler = Sampler(corpus.num_windows, training.global_batch, config.dp, training.seed)
    loader = Loader(corpus, sampler, config, mesh, pin=False)
    losses: list[float] = []
    watched: list[int] = []
    times: list[float] = []
    for step in range(1, training.steps + 1):
        start = time.perf_counter()
        with memory.step(replica.parts, [trainer.optimizer]) as tracked:
            losses.append(trainer.step(loader.next()[0])[0][0].item())
        times.append(time.perf_counter() - start)
        if tracked:
            watched.append(step)
    loader.close()
    tensors = sum(1 for part in replica.parts for _ in part.parameters())
    return {"record": memory.record(), "watched": watched, "losses": losses, "times": times,
            "tensors": tensors}  # fmt: skip


def main() -> None:
    """Run all cases, one after the other."""
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder = Path(sys.argv[2])
    world = join_world("cpu")
    torch.set_num_threads(1)
    told = {name: run(settings, world, folder / name) for name, settings in cases.items()}
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(told), encoding="utf-8")
    if world.size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
