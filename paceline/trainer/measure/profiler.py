"""Base classes of profilers for some steps of some ranks.

An external tool (`nsys`) starts and stops its capture through CUDA's profiler API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import distributed as dist

from paceline.trainer.config import ProfileConfig
from paceline.trainer.parallel.mesh import World

PauseWatchdog = Callable[[], AbstractContextManager[None]]
"""A context in which the watchdog counts no time."""

FOLDER = "profiles"
"""Folder of the profiles, relative to the run folder."""
DATA = "paceline:data"
"""Range of waiting for a batch."""
UPDATE = "paceline:clip"
"""Range of clipping and applying gradients."""


class Profiler:
    """A profiler that does nothing."""

    def before_step(self, step: int) -> None:
        """Handle the start of a step (from 1)."""

    def end_step(self, step: int) -> None:
        """Handle the end of a step, inside its time; its work is queued or, on a CPU, complete."""

    def after_step(self, step: int) -> None:
        """Handle the end of a step, after its time was taken."""

    def is_profiled(self, step: int) -> bool:
        """Return whether this rank is profiled in the step."""
        return False

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return a context that the tool shows as a range of this name."""
        return nullcontext()

    def close(self) -> None:
        """Stop profiling; the training may have ended early."""


class StepProfiler(Profiler):
    """A profiler of the configured steps; subclasses start and stop the tool."""

    def __init__(
        self, config: ProfileConfig, world: World, pause_watchdog: PauseWatchdog = nullcontext
    ) -> None:
        self.config, self.world, self.pause_watchdog = config, world, pause_watchdog

    def is_profiled(self, step: int) -> bool:
        """Return whether this rank is profiled in the step."""
        return self.config.first_step <= step <= self.config.last_step

    def after_step(self, step: int) -> None:
        """Stop after the last step, and wait until all ranks have written their profiles."""
        if step == self.config.last_step:
            with self.pause_watchdog():
                self.close()
                if self.world.backend is not None:
                    dist.barrier()


class UnprofiledRank(StepProfiler):
    """A rank that only waits while other ranks are profiled."""

    def is_profiled(self, step: int) -> bool:
        """Return False."""
        return False


@contextmanager
def closing(profiler: Profiler, pause_watchdog: PauseWatchdog) -> Iterator[None]:
    """Close the profiler after a training; a failed training keeps its own exception."""
    try:
        yield
    except BaseException as error:
        try:
            with pause_watchdog():
                profiler.close()
        except Exception as other:
            error.add_note(f"the profiler cannot be closed either: {other}")
        raise
    with pause_watchdog():
        profiler.close()
