"""Trainings that take turns: all stay in memory, and one works while the others wait.

A training calls `BlockTimer.step` before each of its steps. After every block of steps it reports
its time and waits for permission, so that blocks of all sides are next to each other in time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
Cost = tuple[float, float]
"""Wall time and processor time per step in seconds."""


class BlockTimer:
    """Training's side: reports on standard output and waits on standard input."""

    def __init__(self, block: int, tell: IO[str] = sys.stdout) -> None:
        self.block, self._done, self._tell = block, 0, tell
        self._start: Cost = (0.0, 0.0)

    def step(self) -> None:
        """Return when the next step may begin."""
        if self._done % self.block == 0:
            if self._done:
                now = (time.perf_counter(), time.process_time())
                took = [(b - a) / self.block for a, b in zip(self._start, now, strict=True)]
                print(json.dumps(took), file=self._tell, flush=True)
            if not sys.stdin.readline():
                os._exit(0)  # no more blocks are requested
            self._start = (time.perf_counter(), time.process_time())
        self._done += 1


def own_output() -> IO[str]:
    """Return standard output for the turns; other output goes to standard error."""
    tell = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return tell


class Training:
    """Controller's side: a program of this folder, started at its first block.

    `python` is the interpreter, None this one; `log` takes its standard error, or none does.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        folder: Path,
        threads: int,
        *,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._command = [python or sys.executable, str(HERE / program), *arguments]
        self._folder, self._log = folder, log
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})}
        self._process: subprocess.Popen[str] | None = None

    @classmethod
    def of_file(cls, program: str, settings: Path, block: int, threads: int) -> Training:
        """Return the training of a program with a settings file and the steps of a block."""
        return cls(program, [settings.name, str(block)], settings.parent, threads)

    def work(self) -> Cost:
        """Run a block and return its cost; raise RuntimeError if the program ended instead."""
        process = self._process = self._process or self._start()
        assert process.stdin and process.stdout
        process.stdin.write("\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            output = self._log.read_text(errors="replace")[-3000:] if self._log else ""
            raise RuntimeError(f"{self._command} ended with {process.wait()}\n{output}")
        wall_s, cpu_s = json.loads(line)
        return wall_s, cpu_s

    def end(self) -> None:
        """End the program."""
        if self._process is not None:
            self._process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        errors = self._log.open("w") if self._log else None
        try:
            return subprocess.Popen(
                self._command,
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self._environment,
            )
        finally:
            if errors is not None:
                errors.close()


def in_turn(sides: Sequence[Training], rounds: int, warmup: int) -> list[list[Cost]]:
    """Return the costs of neighboring blocks by side; every other round reverses the order."""
    costs: list[list[Cost]] = []
    for number in range(warmup + rounds):
        order = sides[::-1] if number % 2 else sides
        took = [side.work() for side in order]
        costs.append(took[::-1] if number % 2 else took)
    return costs[warmup:]
