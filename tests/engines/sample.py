"""What a made-up log of a log format is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.steps import FloatColumn, Steps

__all__ = ["RunningTotal", "Sample"]


@dataclass(frozen=True)
class Sample:
    """How a log of one format is made, and how the time of a step is found in what is read."""

    line: Callable[[int, float], bytes]
    """The record of a step: its number and its seconds."""
    head: bytes = b""
    tail: bytes = b""
    first: int = 1
    every: int = 1
    """Distance of the step numbers that the log prints."""
    digits: float = 1e-3
    """By how much a printed time may differ from the true one, as a part of it."""
    seconds: Callable[[Steps], FloatColumn] = lambda steps: steps["step_time_s"]
    first_is_unknown: bool = False
    """True where times are differences between lines, so that the first step has none."""
    prefixed: bool = True
    """False where a line is JSON of its own file, so that nothing ever stands before it."""

    def numbers(self, n: int) -> range:
        """The numbers of the first n steps."""
        return range(self.first, self.first + n * self.every, self.every)


class RunningTotal:
    """The seconds since the run began, which a log carries along from line to line."""

    def __init__(self) -> None:
        self._number, self._total_s = 0, 0.0

    def after(self, number: int, seconds: float) -> float:
        """The total once step `number` has taken `seconds`; another run begins where it jumps."""
        if number != self._number + 1:
            self._total_s = (number - 1) * seconds
        self._number, self._total_s = number, self._total_s + seconds
        return self._total_s
