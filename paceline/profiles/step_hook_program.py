"""Attaches PyTorch's profiler to a program that knows nothing of it; alone, in no package.

Lies as `sitecustomize.py` in a folder of PYTHONPATH, so Python runs it before any program. A step
ends when the program's first optimizer has stepped, from whichever framework it is called.

PACELINE_PROFILED_STEPS holds `20-30`, PACELINE_PROFILED_RANKS `0,8`; RANK is the process's own.
Traces go to the folder above this file, as rank-NNNNN.trace.json.gz.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent
OPTIMIZERS = "torch.optim.optimizer"


class OptimizerFinder(importlib.abc.MetaPathFinder):
    """Has a hook registered as soon as PyTorch's optimizers are imported."""

    def __init__(self, hook: StepProfiling) -> None:
        self.hook = hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module as others find it, with the hook behind its import."""
        if fullname != OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                module.register_optimizer_step_post_hook(self.hook)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class StepProfiling:
    """Called behind every optimizer's step; counts those of the first one."""

    def __init__(self, first: int, last: int, rank: int) -> None:
        self.first, self.last, self.rank = first, last, rank
        self.counted: int | None = None
        self.done = 0
        self.profiler: Any = None

    def __call__(self, optimizer: object, args: object, kwargs: object) -> None:
        """Begin with the step before the first one, and write the trace behind the last one."""
        self.counted = self.counted or id(optimizer)
        if id(optimizer) != self.counted or self.done > self.last:
            return
        self.done += 1
        if self.profiler is not None:
            self.profiler.step()
            if self.done == self.last:
                self.profiler.stop()
                self.profiler = None
        elif self.first - 1 <= self.done + 1 <= self.last:
            self.profiler = self._started()

    def _started(self) -> Any:
        torch_profiler: Any = importlib.import_module("torch.profiler")
        actions = torch_profiler.ProfilerAction

        def action(step: int) -> Any:
            if step < self.first:
                return actions.WARMUP
            if step < self.last:
                return actions.RECORD
            return actions.RECORD_AND_SAVE if step == self.last else actions.NONE

        profiler = torch_profiler.profile(schedule=action, on_trace_ready=self._written)
        # Its marks get the program's numbers.
        profiler.step_num = self.done + 1
        profiler.current_action = action(profiler.step_num)
        profiler.start()
        return profiler

    def _written(self, profiler: Any) -> None:
        profiler.export_chrome_trace(str(FOLDER.parent / f"rank-{self.rank:05d}.trace.json.gz"))


def attach() -> None:
    """Put the hook in place on a chosen rank."""
    ranks = os.environ.get("PACELINE_PROFILED_RANKS", "").split(",")
    rank = os.environ.get("RANK", "0")
    steps = os.environ.get("PACELINE_PROFILED_STEPS", "")
    if steps and rank in ranks:
        first, last = map(int, steps.split("-"))
        sys.meta_path.insert(0, OptimizerFinder(StepProfiling(first, last, int(rank))))


def run_the_next() -> None:
    """Run the `sitecustomize` that this one stands before, if there is one."""
    ours = sys.modules.pop(__name__, None)
    paths = [*sys.path]
    sys.path[:] = [path for path in paths if Path(path or ".").resolve() != FOLDER]
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    sys.path[:] = paths
    if ours is not None:
        sys.modules.setdefault(__name__, ours)


if __name__ == "sitecustomize":
    attach()
    run_the_next()
