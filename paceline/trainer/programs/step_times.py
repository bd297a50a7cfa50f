"""Time a few training steps of each of many layouts.

Run as python -m paceline.trainer.programs.step_times '{"file": CASES.json}', once per rank.

The file holds {"cases": [{"name", "settings", "steps"}]} with the trainer's settings of each case,
all for one number of ranks. The cases run one after the other in the same processes, in the
trainer's own loop. Rank 0 prints a JSON line per case: {"event": "steps", "name", "times_s":
[...]}. A step's time is that of its slowest rank. The first steps, in which memory is touched and
kernels are selected, are included.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from paceline.trainer.config import ConfigError, TrainerConfig, parse_config
from paceline.trainer.config_checks import config_problems
from paceline.trainer.data.batches import Loader, sampler_of
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.measure.clock import StepClock, clock_of
from paceline.trainer.measure.machine import die_with_parent
from paceline.trainer.parallel.mesh import Mesh, World, join_world, make_mesh
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.train import check_device, set_threads
from paceline.trainer.trainer import Trainer


class StepTimer:
    """Event log that keeps only the step times."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def write(self, event: str, **values: Any) -> None:
        """Keep a step's time."""
        if event == "step":
            self.seconds.append(values["step_time_s"])


def main(settings: dict[str, str]) -> None:
    """Train every case for its number of steps."""
    cases = json.loads(Path(settings["file"]).read_text(encoding="utf-8"))["cases"]
    first = parse_config(cases[0]["settings"])
    check_device(first.device)
    world = join_world(first.device)
    for case in cases:
        times_s = slowest(train_case(case, world), world)
        if world.rank == 0:
            line = {"event": "steps", "name": case["name"], "times_s": times_s}
            print(json.dumps({**line, "torch": torch.__version__}), flush=True)
    if world.size > 1:
        dist.barrier()


def train_case(case: dict[str, Any], world: World) -> list[float]:
    """Return the seconds of each step of a case on this rank.

    Raises ConfigError if the case cannot run.
    """
    config = parse_config(case["settings"])
    config = replace(config, training=replace(config.training, steps=case["steps"]))
    problems = config_problems(config, world.size)
    if problems:
        raise ConfigError(f"{case['name']}: {'; '.join(problems)}")
    set_threads(config.threads)
    torch.set_float32_matmul_precision(config.training.matmul_precision)
    mesh = mesh_of(config, world)
    steps = StepClock(clock_of(world.device))
    corpus, times = load_corpus(config), StepTimer()
    trainer = Trainer(
        config=config,
        replica=make_replica(config, world, mesh, steps),
        world=world,
        steps=steps,
        events=times,  # type: ignore[arg-type]
        masked=corpus.masked,
    )
    sampler = sampler_of(config, corpus.num_windows)
    loader = Loader(corpus, sampler, config, mesh, pin=world.device.type == "cuda")
    try:
        trainer.run(loader, {})
    finally:
        loader.close()
        gc.enable()
        gc.unfreeze()
    del trainer
    gc.collect()
    return times.seconds


def slowest(times_s: list[float], world: World) -> list[float]:
    """Return the time of the slowest rank for every step."""
    if world.size == 1:
        return times_s
    longest_s = torch.tensor(times_s, dtype=torch.float64, device=world.device)
    dist.all_reduce(longest_s, op=dist.ReduceOp.MAX)
    return longest_s.tolist()


def mesh_of(config: TrainerConfig, world: World) -> Mesh:
    """Return the layout's mesh; equal sizes share one mesh, because groups are never freed."""
    sizes = replace(
        config.layout,
        vp=1,
        micro_batch=1,
        recompute="none",
        schedule="",
        cp_exchange="",
        zero_stage=2 if config.layout.zero_stage >= 2 else 0,
        sequence_parallel=False,
    )
    return _shared_mesh(world, sizes, config.dp)


_shared_mesh = cache(make_mesh)


if __name__ == "__main__":
    if "RANK" in os.environ:
        die_with_parent(os.getppid())
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    # As in the trainer: a normal exit may wait for peers, and gloo's threads can abort it.
    os._exit(0)
