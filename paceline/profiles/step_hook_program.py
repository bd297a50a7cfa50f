"""Attach PyTorch's profiler to a program without changing it.

The file is copied as `sitecustomize.py` into a folder of PYTHONPATH, so Python runs it before any
program. It imports nothing from Paceline. A step ends with the step of the program's first
optimizer, in any framework.

PACELINE_PROFILED_STEPS is like `20-30`, PACELINE_PROFILED_RANKS like `0,8`. The rank comes from
RANK or, at the first step, from torch.distributed. Traces are written to the parent folder of this
file as rank-NNNNN.trace.json.gz. An error here never stops the program.
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
    """Import hook that registers a step hook when PyTorch's optimizers are imported."""

    def __init__(self, hook: StepProfiling) -> None:
        self.hook = hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, with the hook registered after its import."""
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
    """Hook after every optimizer step, which counts the steps of the first optimizer."""

    def __init__(self, first: int, last: int, ranks: Sequence[int]) -> None:
        self.first, self.last, self.ranks = first, last, ranks
        self.profiled_optimizer: tuple[int, int] | None = None
        self.num_steps = 0
        self.rank = 0
        self.profiler: Any = None

    def __call__(self, optimizer: Any, args: object, kwargs: object) -> None:
        """Start the profiler before the first profiled step; write the trace after the last."""
        optimizer_key = _optimizer_key(optimizer)
        if self.profiled_optimizer is None:
            self.profiled_optimizer, self.rank = optimizer_key, _rank()
            if self.rank not in self.ranks:
                self.num_steps = self.last
        if optimizer_key != self.profiled_optimizer or self.num_steps >= self.last:
            return
        self.num_steps += 1
        try:
            self._advance()
        except Exception as error:
            print(f"paceline: no profile: {type(error).__name__}: {error}", file=sys.stderr)
            self.num_steps, self.profiler = self.last, None

    def _advance(self) -> None:
        if self.profiler is not None:
            self.profiler.step()
            if self.num_steps == self.last:
                self.profiler.stop()
                self.profiler = None
        elif self.first - 1 <= self.num_steps + 1 <= self.last:
            self.profiler = self._start_profiler()

    def _start_profiler(self) -> Any:
        torch_profiler: Any = importlib.import_module("torch.profiler")
        actions = torch_profiler.ProfilerAction

        def action(step: int) -> Any:
            if step < self.first:
                return actions.WARMUP
            if step < self.last:
                return actions.RECORD
            return actions.RECORD_AND_SAVE if step == self.last else actions.NONE

        profiler = torch_profiler.profile(schedule=action, on_trace_ready=self._write_trace)
        # The profiler's marks have the program's step numbers.
        profiler.step_num = self.num_steps + 1
        profiler.current_action = action(profiler.step_num)
        profiler.start()
        return profiler

    def _write_trace(self, profiler: Any) -> None:
        trace = FOLDER.parent / f"rank-{self.rank:05d}.trace.json.gz"
        temporary = trace.with_name(f"{trace.name}.{os.getpid()}.gz")
        profiler.export_chrome_trace(str(temporary))
        temporary.replace(trace)


def _optimizer_key(optimizer: Any) -> tuple[int, int]:
    """Return optimizer and first parameter: DeepSpeed reuses one optimizer for all groups."""
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return id(optimizer), id(next(parameters, None))


def _rank() -> int:
    """Return the rank from RANK or, if the program starts ranks, from torch.distributed."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    group: Any = sys.modules.get("torch.distributed")
    return group.get_rank() if group and group.is_available() and group.is_initialized() else 0


def attach() -> None:
    """Install the hook if this process may be a chosen rank."""
    ranks = [int(rank) for rank in os.environ.get("PACELINE_PROFILED_RANKS", "0").split(",")]
    steps = os.environ.get("PACELINE_PROFILED_STEPS", "")
    if steps and ("RANK" not in os.environ or _rank() in ranks):
        first, last = map(int, steps.split("-"))
        sys.meta_path.insert(0, OptimizerFinder(StepProfiling(first, last, ranks)))


def run_next_sitecustomize() -> None:
    """Run the next `sitecustomize` on the path, if there is one."""
    ours = sys.modules.pop(__name__, None)
    # Not restored: paths that the other one adds must stay. Children get the folder by PYTHONPATH.
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
    run_next_sitecustomize()
