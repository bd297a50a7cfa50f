"""What one parsed log says: status, steps, figures, and where it disagrees with itself."""

from __future__ import annotations

from typing import Literal

from paceline.core.result import Metric, WindowRecord
from paceline.core.run import RunSettings
from paceline.core.stats import Summary
from paceline.core.value import NonNegativeInt, Value

LogStatus = Literal["ok", "empty", "not-a-training-log", "unreadable", "truncated", "nan", "oom"]


class StepTimes(Value):
    """Step times of the window in seconds; None where one figure stands for the whole run."""

    median: float
    mad: float | None
    mean: float
    p05: float | None
    p95: float | None
    n: NonNegativeInt
    """Step lines behind the figures."""


class Disagreement(Value):
    """A figure that the log prints and that does not follow from its own step times."""

    figure: str
    printed: float
    computed: float
    unit: str
    ratio: float
    """printed / computed"""
    cause: str
    """The likely one, or that none is known."""


class ParsedLog(Value):
    """One log file as `paceline parse --json` prints it."""

    schema_version: int = 1
    file: str
    engine: str | None
    """The log format in which it was read; None when it is none that is known."""
    status: LogStatus
    reason: str | None = None
    """Why the status is not ok, in one sentence."""
    n_steps: NonNegativeInt = 0
    """Step lines, repeated ones left out."""
    window: WindowRecord | None = None
    step_time_s: StepTimes | None = None
    tokens_per_s: float | None = None
    """At the median step over all devices; real tokens where the recipe states the padding."""
    samples_per_s: float | None = None
    reported: dict[str, float] = {}
    """What the log prints itself, in base units: medians over the window, or its one figure."""
    disagreements: tuple[Disagreement, ...] = ()
    metrics: dict[str, Metric] = {}
    conventions: dict[str, str] = {}
    facts: RunSettings = RunSettings(origin="imported")
    sources: dict[str, str] = {}
    """`path` for each fact that neither the user nor the log states, but the folders above it."""
    num_bytes: NonNegativeInt = 0
    """Size of the text, after decompression."""
    warnings: tuple[str, ...] = ()


def step_times(summary: Summary, as_printed: bool) -> StepTimes:
    """The window's step times; without a spread for the one figure of a whole run."""
    return StepTimes(
        median=summary.median,
        mad=None if as_printed else summary.mad,
        mean=summary.mean,
        p05=None if as_printed else summary.p05,
        p95=None if as_printed else summary.p95,
        n=summary.n,
    )
