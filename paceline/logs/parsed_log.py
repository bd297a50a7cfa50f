"""Result of one parsed log: status, steps, figures and disagreements."""

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
    """Number of step lines behind the figures."""


class Disagreement(Value):
    """A figure that the log prints and that does not follow from its own step times."""

    figure: str
    printed: float
    computed: float
    unit: str
    ratio: float
    """Ratio of printed to computed figure."""
    cause: str
    """Likely cause, or a statement that none is known."""


class ParsedLog(Value):
    """One log file as printed by `paceline parse --json`."""

    schema_version: int = 1
    file: str
    engine: str | None
    """Log format in which the file was read; None if the format is unknown."""
    status: LogStatus
    reason: str | None = None
    """Reason why the status is not ok, in one sentence."""
    date: str | None = None
    """Date of the run, ISO 8601, UTC, from the dates in the log's lines; None without dates."""
    n_steps: NonNegativeInt = 0
    """Number of step lines, without repeated ones."""
    window: WindowRecord | None = None
    step_time_s: StepTimes | None = None
    tokens_per_s: float | None = None
    """Tokens per second over all devices at the median step; real tokens if the recipe states the
    padding."""
    samples_per_s: float | None = None
    reported: dict[str, float] = {}
    """Figures that the log itself prints, in base units: medians over the window, or one figure for
    the run."""
    disagreements: tuple[Disagreement, ...] = ()
    metrics: dict[str, Metric] = {}
    conventions: dict[str, str] = {}
    settings: RunSettings = RunSettings(origin="imported")
    sources: dict[str, str] = {}
    """`path` for each setting that only the folders above the log state."""
    num_bytes: NonNegativeInt = 0
    """Size of the text in bytes, after decompression."""
    warnings: tuple[str, ...] = ()


def step_times(summary: Summary, as_printed: bool) -> StepTimes:
    """Return the window's step times, without a spread for the one figure of a whole run."""
    return StepTimes(
        median=summary.median,
        mad=None if as_printed else summary.mad,
        mean=summary.mean,
        p05=None if as_printed else summary.p05,
        p95=None if as_printed else summary.p95,
        n=summary.n,
    )
