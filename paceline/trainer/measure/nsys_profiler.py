"""Marks for Nsight Systems: where its capture begins and ends, steps, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from paceline.trainer.measure.profiler import Paused, StepProfiler
from paceline.trainer.measure.torch_profiler import mark_collectives
from paceline.trainer.parallel.mesh import World
from paceline.trainer.side_outputs import ProfileConfig


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

    def before(self, step: int) -> None:
        """Begin with the first step; each is a range with its number and the rank."""
        if not self.attached(step):
            return
        if self._undo is None:
            torch.cuda.synchronize(self.world.device)
            self._undo = mark_collectives(self.axes, torch.cuda.nvtx.range)
            torch.cuda.profiler.start()
        torch.cuda.nvtx.range_push(f"paceline:step {step} rank {self.world.rank}")

    def after(self, step: int) -> None:
        """End the step, and the capture when the device has done the last one."""
        if self._undo is not None:
            torch.cuda.nvtx.range_pop()
        super().after(step)

    def marked(self, name: str) -> AbstractContextManager[object]:
        """A range of that name."""
        return super().marked(name) if self._undo is None else torch.cuda.nvtx.range(name)

    def close(self) -> None:
        """End the capture, if it has begun."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
            torch.cuda.synchronize(self.world.device)
            torch.cuda.profiler.stop()
