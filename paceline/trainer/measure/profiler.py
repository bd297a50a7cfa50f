"""A profiler for some steps of some ranks, as the input asks; without it nothing is touched.

A tool that lives outside of this program (`nsys`) is told by the device's profiler interface where
its capture begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import distributed as dist

from paceline.trainer.parallel.mesh import World
from paceline.trainer.side_outputs import ProfileConfig

Paused = Callable[[], AbstractContextManager[None]]
"""In which the watchdog counts no time."""

FOLDER = "profiles"
"""Where the tools' files go, relative to the run folder."""
DATA = "paceline:data"
"""Marks waiting for a batch, ..."""
UPDATE = "paceline:clip"
"""... and clipping and applying gradients."""


class Profiler:
    """Does nothing; what a step runs in is as fast as without it."""

    def before(self, step: int) -> None:
        """A step (from 1) begins."""

    def ended(self, step: int) -> None:
        """A step has been queued on a device, or done on a CPU; its time still runs."""

    def after(self, step: int) -> None:
        """The step's time has been taken."""

    def attached(self, step: int) -> bool:
        """Whether this rank was profiled in that step."""
        return False

    def marked(self, name: str) -> AbstractContextManager[object]:
        """A stretch of the step that the tool shows by this name."""
        return nullcontext()

    def close(self) -> None:
        """The training has ended, maybe early."""


class StepProfiler(Profiler):
    """Of the steps that a configuration names; subclasses begin and end."""

    def __init__(self, config: ProfileConfig, world: World, paused: Paused = nullcontext) -> None:
        self.config, self.world, self.paused = config, world, paused

    def attached(self, step: int) -> bool:
        """Whether this rank was profiled in that step."""
        return self.config.first_step <= step <= self.config.last_step

    def after(self, step: int) -> None:
        """End with the last step: each rank waits, as long as it takes, until all have ended."""
        if step == self.config.last_step:
            with self.paused():
                self.close()
                if self.world.backend is not None:
                    dist.barrier()


class Bystander(StepProfiler):
    """Of a rank that is not profiled while others are."""

    def attached(self, step: int) -> bool:
        """Never."""
        return False


@contextmanager
def closing(profiler: Profiler, paused: Paused) -> Iterator[None]:
    """Close the profiler behind a training; one that failed keeps its own exception."""
    try:
        yield
    except BaseException as error:
        try:
            with paused():
                profiler.close()
        except Exception as other:
            error.add_note(f"its profiler cannot be closed either: {other}")
        raise
    with paused():
        profiler.close()
