"""Two trainings that take turns: both stay in memory, and one works while the other waits.

A training asks `Turn.step` before each of its steps. Behind every block of steps it tells what the
block took and waits until it is let on, so blocks of both sides lie next to each other in time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
Cost = tuple[float, float]
"""Seconds by the clock and of the processor, a step."""


class Turn:
    """The training's end of it: tells and asks through standard output and input."""

    def __init__(self, block: int) -> None:
        self.block, self._done = block, 0
        self._start: Cost = (0.0, 0.0)

    def step(self) -> None:
        """Return when the next step may begin."""
        if self._done % self.block == 0:
            if self._done:
                now = (time.perf_counter(), time.process_time())
                took = [(b - a) / self.block for a, b in zip(self._start, now, strict=True)]
                print(json.dumps(took), flush=True)
            if not sys.stdin.readline():
                os._exit(0)  # nobody wants another block
            self._start = (time.perf_counter(), time.process_time())
        self._done += 1


class Training:
    """The other end of it: a program of this folder, given a settings file and a block's steps."""

    def __init__(self, program: str, settings: Path, block: int, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / program), settings.name, str(block)],
            cwd=settings.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )

    def work(self) -> Cost:
        """Have it do a block. Raises RuntimeError when it ended instead."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
        wall_s, cpu_s = json.loads(line)
        return wall_s, cpu_s

    def end(self) -> None:
        """Let it go."""
        self._process.communicate()


def in_turn(ours: Training, peer: Training, pairs: int, warmup: int) -> list[tuple[Cost, Cost]]:
    """Pairs of neighbouring blocks; who goes first alternates."""
    costs: list[tuple[Cost, Cost]] = []
    for pair in range(warmup + pairs):
        if pair % 2:
            later = peer.work()
            costs.append((ours.work(), later))
        else:
            first = ours.work()
            costs.append((first, peer.work()))
    return costs[warmup:]
