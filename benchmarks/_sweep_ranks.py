"""One rank of a world that goes through many layouts in rounds, a few trainer's steps of each.

    _sweep_ranks.py QUESTION.json ANSWER.json

The question is {layouts, rounds, steps, threads}: trainer.json of each layout, how often all of
them are gone through, the steps of one turn, of which the first is not counted, and the threads of
a rank. The answer is, for every layout and round, the median seconds of the counted steps on this
rank.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from statistics import median

import torch
from _layout_ranks import stepper, time_step, together, trainer_of

from paceline.trainer.measure.clock import HostClock, StepClock, watch_waits
from paceline.trainer.measure.machine import keep_freed_memory
from paceline.trainer.parallel.mesh import join_world

WARMUP = 1


def main(question: Path, into: Path) -> None:
    """Go through all layouts again and again in one world."""
    order = json.loads(question.read_text())
    keep_freed_memory()
    torch.set_num_threads(order["threads"])
    world, clock = join_world("cpu"), StepClock(HostClock())
    if world.size > 1:
        watch_waits(clock)
    steps = [stepper(trainer_of(raw, world, clock, into.parent)) for raw in order["layouts"]]
    gc.collect()
    gc.freeze()
    gc.disable()
    by_layout: list[list[float]] = [[] for _ in steps]
    for turn in range(WARMUP + order["rounds"]):
        for times, step in zip(by_layout, steps, strict=True):
            together(world)
            seconds = [time_step(step, clock)["step_time_s"] for _ in range(order["steps"])]
            if turn >= WARMUP:
                times.append(median(seconds[1:]))
    into.with_name(f"{world.rank}-{into.name}").write_text(json.dumps(by_layout))
    together(world)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a normal exit


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
