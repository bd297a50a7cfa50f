"""Attaches PyTorch's profiler to a program that knows nothing of it; alone, in no package.

Lies as `sitecustomize.py` in a folder of PYTHONPATH, so Python runs it before any program. A step
ends when the program's first optimizer has stepped, from whichever framework it is called.

PACELINE_PROFILED_STEPS holds `20-30`, PACELINE_PROFILED_RANKS `0,8`. RANK is the process's own, or
torch.distributed knows it at the first step. Traces go to the folder above this file, as
rank-NNNNN.trace.json.gz. Whatever fails here, the program goes on.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
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
                register = getattr(module, "register_optimizer_step_post_hook", None)
                if register is not None:  # PyTorch 2.0 and later
                    register(self.hook)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class StepProfiling:
    """Called behind every optimizer's step; counts those of the first one."""

    def __init__(self, first: int, last: int, ranks: Sequence[int]) -> None:
        self.first, self.last, self.ranks = first, last, ranks
        self.counted: tuple[int, int] | None = None
        self.done = 0
        self.rank = 0
        self.profiler: Any = None

    def __call__(self, optimizer: Any, args: object, kwargs: object) -> None:
        """Begin with the step before the first one, and write the trace behind the last one."""
        stepped = _stepped(optimizer)
        if self.counted is None:
            self.counted, self.rank = stepped, _rank()
            if self.rank not in self.ranks:
                self.done = self.last
        if stepped != self.counted or self.done >= self.last:
            return
        self.done += 1
        try:
            self._follow()
        except Exception as error:
            print(f"paceline: no profile: {type(error).__name__}: {error}", file=sys.stderr)
            self.done, self.profiler = self.last, None

    def _follow(self) -> None:
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
        trace = FOLDER.parent / f"rank-{self.rank:05d}.trace.json.gz"
        written = trace.with_name(f"{trace.name}.{os.getpid()}.gz")
        profiler.export_chrome_trace(str(written))
        written.replace(trace)


def _stepped(optimizer: Any) -> tuple[int, int]:
    """The optimizer and its first parameter: DeepSpeed lends one optimizer a group at a time."""
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return id(optimizer), id(next(parameters, None))


def _rank() -> int:
    """The process's own; programs that start their ranks themselves tell it to PyTorch alone."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    group: Any = sys.modules.get("torch.distributed")
    return group.get_rank() if group and group.is_available() and group.is_initialized() else 0


def attach() -> None:
    """Put the hook in place where a chosen rank may be."""
    ranks = [int(rank) for rank in os.environ.get("PACELINE_PROFILED_RANKS", "0").split(",")]
    steps = os.environ.get("PACELINE_PROFILED_STEPS", "")
    if steps and ("RANK" not in os.environ or _rank() in ranks):
        first, last = map(int, steps.split("-"))
        sys.meta_path.insert(0, OptimizerFinder(StepProfiling(first, last, ranks)))


def run_the_next() -> None:
    """Run the `sitecustomize` that this one stands before, if there is one."""
    ours = sys.modules.pop(__name__, None)
    # Not put back: what the other one adds has to stay. Children take the folder from PYTHONPATH.
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != FOLDER]
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault(__name__, ours)


if __name__ == "sitecustomize":
    attach()
    run_the_next()
