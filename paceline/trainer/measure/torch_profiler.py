"""PyTorch's profiler for some steps, with a compressed trace, and Nsight Systems.

Nsight Systems gets markers: the start and the end of its capture, steps, and waits.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from paceline.trainer.config import ProfileConfig
from paceline.trainer.measure.profiler import FOLDER, PauseWatchdog, StepProfiler
from paceline.trainer.parallel.mesh import World

ISSUED = "paceline:communication:"
"""Prefix of the range in which a collective is issued; the group's axis and the method follow."""
COLLECTIVES = re.compile(r"_?(?:all_?)?(?:gather|reduce|broadcast|scatter|to_?all|send|recv)")
"""Methods of a process group that every call from Python uses."""


class TorchProfiler(StepProfiler):
    """PyTorch's profiler with one trace per rank; the step before the first one is a warm-up.

    Steps have the same numbers in the trace as in the event lines.
    """

    def __init__(
        self,
        config: ProfileConfig,
        world: World,
        axes: Mapping[str, str],
        pause_watchdog: PauseWatchdog = nullcontext,
    ) -> None:
        super().__init__(config, world, pause_watchdog)
        self.axes = axes
        self._profile: Any = None
        self._undo: Callable[[], None] | None = None

    def before_step(self, step: int) -> None:
        """Start with the step before the first one, or with the first."""
        if step != max(self.config.first_step - 1, 1):
            return
        activities = [ProfilerActivity.CPU]
        if self.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, schedule=self._action)
        self._profile.step_num = step
        self._profile.current_action = self._action(step)
        self._profile.start()
        self._profile.add_metadata_json(
            "paceline", json.dumps({"rank": self.world.rank, "axes": dict(self.axes)})
        )
        if self.world.device.type == "cpu":
            self._undo = mark_collectives(self.axes)  # NCCL's kernels report their group

    def end_step(self, step: int) -> None:
        """Count the step; the time to start recording belongs to the step before."""
        if self._profile is not None and step < self.config.last_step:
            self._profile.step()

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return a context that the trace shows as a range of this name."""
        return super().range(name) if self._profile is None else record_function(name)

    def close(self) -> None:
        """Stop, and write the trace so far."""
        running, self._profile = self._profile, None
        if self._undo is not None:
            self._undo()
            self._undo = None
        if running is None:
            return
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        is_recording = running.current_action != ProfilerAction.WARMUP
        running.stop()
        if is_recording:
            write_trace(running, Path(FOLDER) / f"rank-{self.world.rank}.trace.json.gz")

    def _action(self, step: int) -> ProfilerAction:
        is_recording = step >= self.config.first_step
        return ProfilerAction.RECORD if is_recording else ProfilerAction.WARMUP


def write_trace(running: Any, path: Path) -> None:
    """Write the trace as gzipped JSON; the file appears only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain, packed = path.with_name(f".{path.stem}"), path.with_name(f".{path.name}")
    running.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
        shutil.copyfileobj(source, target, 1 << 20)
    plain.unlink()
    packed.replace(path)


def mark_collectives(
    axes: Mapping[str, str],
    mark: Callable[[str], AbstractContextManager[object]] = record_function,
) -> Callable[[], None]:
    """Mark every collective with its axis while it is issued; return a function that undoes it.

    gloo's own sending threads do not report their group.
    """
    # From `vars`, because attributes of the class would be functions that bind no instance.
    originals = {n: m for n, m in vars(dist.ProcessGroup).items() if COLLECTIVES.match(n)}

    def marking(name: str, method: Any) -> Callable[..., Any]:
        def issue(self: Any, *args: Any, **kwargs: Any) -> Any:
            axis = axes.get(self.group_name, "world")
            with mark(f"{ISSUED}{axis}:{name}"):
                return method.__get__(self)(*args, **kwargs)

        return issue

    def undo() -> None:
        for name, method in originals.items():
            setattr(dist.ProcessGroup, name, method)

    for name, method in originals.items():
        setattr(dist.ProcessGroup, name, marking(name, method))
    return undo


class NsysProfiler(StepProfiler):
    """Nsight Systems profiler, on CUDA only.

    PyTorch for CPUs has no NVTX, and `nsys` records the whole program there.
    """

    def __init__(
        self,
        config: ProfileConfig,
        world: World,
        axes: Mapping[str, str],
        pause_watchdog: PauseWatchdog = nullcontext,
    ) -> None:
        super().__init__(config, world, pause_watchdog)
        self.axes = axes
        self._undo: Callable[[], None] | None = None

    def before_step(self, step: int) -> None:
        """Start with the first step; each step is a range with its number and the rank."""
        if not self.is_profiled(step):
            return
        if self._undo is None:
            torch.cuda.synchronize(self.world.device)
            self._undo = mark_collectives(self.axes, torch.cuda.nvtx.range)
            torch.cuda.profiler.start()
        torch.cuda.nvtx.range_push(f"paceline:step {step} rank {self.world.rank}")

    def after_step(self, step: int) -> None:
        """End the step, and the capture when the device has completed the last step."""
        if self._undo is not None:
            torch.cuda.nvtx.range_pop()
        super().after_step(step)

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return a context that `nsys` shows as a range of this name."""
        return super().range(name) if self._undo is None else torch.cuda.nvtx.range(name)

    def close(self) -> None:
        """Stop the capture, if it has started."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
            torch.cuda.synchronize(self.world.device)
            torch.cuda.profiler.stop()
