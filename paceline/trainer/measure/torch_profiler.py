"""PyTorch's profiler around some steps, its trace written compressed.

Nsight Systems gets marks: where its capture begins and ends, steps, and what is waited for.
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

from paceline.trainer.measure.profiler import FOLDER, Paused, StepProfiler
from paceline.trainer.parallel.mesh import World
from paceline.trainer.side_outputs import ProfileConfig

ISSUED = "paceline:communication:"
"""Marks where a collective is issued, with the axis of its group and the method's name."""
COLLECTIVES = re.compile(r"_?(?:all_?)?(?:gather|reduce|broadcast|scatter|to_?all|send|recv)")
"""Methods of a process group through which every call in Python goes."""


class TorchProfiler(StepProfiler):
    """One trace a rank; the step before the first one is run under the profiler and not kept.

    Steps are called in the trace as in the event lines.
    """

    def __init__(
        self,
        config: ProfileConfig,
        world: World,
        axes: Mapping[str, str],
        paused: Paused = nullcontext,
    ) -> None:
        super().__init__(config, world, paused)
        self.axes = axes
        self._profile: Any = None
        self._undo: Callable[[], None] | None = None

    def before_step(self, step: int) -> None:
        """Begin with the step before the first one, or with the first."""
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
            self._undo = mark_collectives(self.axes)  # NCCL's kernels know their group

    def end_step(self, step: int) -> None:
        """Count the step: what it takes to begin recording is the time of the one before."""
        if self._profile is not None and step < self.config.last_step:
            self._profile.step()

    def range(self, name: str) -> AbstractContextManager[object]:
        """A stretch of the step that the trace shows by this name."""
        return super().range(name) if self._profile is None else record_function(name)

    def close(self) -> None:
        """End, and write what there is."""
        running, self._profile = self._profile, None
        if self._undo is not None:
            self._undo()
            self._undo = None
        if running is None:
            return
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        recorded = running.current_action != ProfilerAction.WARMUP
        running.stop()
        if recorded:
            write_trace(running, Path(FOLDER) / f"rank-{self.world.rank}.trace.json.gz")

    def _action(self, step: int) -> ProfilerAction:
        recorded = step >= self.config.first_step
        return ProfilerAction.RECORD if recorded else ProfilerAction.WARMUP


def write_trace(running: Any, path: Path) -> None:
    """The trace as gzipped JSON, there whole or not at all."""
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
    """Mark every collective with its axis while it is issued; returns the undo.

    gloo's own threads, which send, do not say for which group they do.
    """
    # As attributes of the class they would come back as functions that bind no instance.
    usual = {n: m for n, m in vars(dist.ProcessGroup).items() if COLLECTIVES.match(n)}

    def marking(name: str, method: Any) -> Callable[..., Any]:
        def issue(self: Any, *args: Any, **kwargs: Any) -> Any:
            axis = axes.get(self.group_name, "world")
            with mark(f"{ISSUED}{axis}:{name}"):
                return method.__get__(self)(*args, **kwargs)

        return issue

    def undo() -> None:
        for name, method in usual.items():
            setattr(dist.ProcessGroup, name, method)

    for name, method in usual.items():
        setattr(dist.ProcessGroup, name, marking(name, method))
    return undo


class NsysProfiler(StepProfiler):
    """On CUDA alone: PyTorch for CPUs has no NVTX, and `nsys` records all of a program there."""

    def __init__(
        self,
        config: ProfileConfig,
        world: World,
        axes: Mapping[str, str],
        paused: Paused = nullcontext,
    ) -> None:
        super().__init__(config, world, paused)
        self.axes = axes
        self._undo: Callable[[], None] | None = None

    def before_step(self, step: int) -> None:
        """Begin with the first step; each is a range with its number and the rank."""
        if not self.is_profiled(step):
            return
        if self._undo is None:
            torch.cuda.synchronize(self.world.device)
            self._undo = mark_collectives(self.axes, torch.cuda.nvtx.range)
            torch.cuda.profiler.start()
        torch.cuda.nvtx.range_push(f"paceline:step {step} rank {self.world.rank}")

    def after_step(self, step: int) -> None:
        """End the step, and the capture when the device has done the last one."""
        if self._undo is not None:
            torch.cuda.nvtx.range_pop()
        super().after_step(step)

    def range(self, name: str) -> AbstractContextManager[object]:
        """A range of that name."""
        return super().range(name) if self._undo is None else torch.cuda.nvtx.range(name)

    def close(self) -> None:
        """End the capture, if it has begun."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
            torch.cuda.synchronize(self.world.device)
            torch.cuda.profiler.stop()
