"""What a comparison yields: `paceline compare --json` prints it."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from paceline.core.value import NonNegativeInt, Value

MetricVerdict = Literal[
    "same", "slower", "faster", "better", "worse", "differs", "undecided", "unknown"
]
"""What one metric says of the candidate; better and worse where speed is not the matter."""

Verdict = Literal[
    "same",
    "slower",
    "faster",
    "better",
    "worse",
    "differs",
    "undecided",
    "not comparable",
    "invalid",
]


MAX_NAME = 40
"""Characters of a side's name that stands in a title."""


class KeyDifference(Value):
    """A setting in which the sides are not alike."""

    key: str
    baseline: str
    candidate: str
    allowed: bool


class SideFigure(Value):
    """One metric of one side."""

    value: float | None
    """Geometric mean over the repeats."""
    n: NonNegativeInt
    """Runs behind the value; 1 for a published figure."""
    spread: float | None = None
    """Relative standard deviation between the repeats, from two on."""
    values: tuple[float, ...] = ()
    """One value a run, in the order of the side's runs."""


class MetricComparison(Value):
    """One metric of both sides; `ratio` is the candidate's value over the baseline's."""

    metric: str
    unit: str
    better: Literal["lower", "higher"] | None
    """Which way is an improvement; None where neither is."""
    primary: bool
    """Whether the verdict depends on it."""
    baseline: SideFigure
    candidate: SideFigure
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    """95 % interval of the ratio over repeats; None with fewer than three a side."""
    p: float | None = None
    """Two-sided p of "no difference beyond rounding", uncorrected."""
    p_corrected: float | None = None
    """The same corrected for the number of metrics that were tested (false discovery rate)."""
    resolution: NonNegativeFloat = 0.0
    """How far rounding in print may move the ratio; it widens the margin."""
    verdict: MetricVerdict = "unknown"
    repeats_needed: NonNegativeInt | None = None
    """Further repeats a side for a decision; None where that cannot be told."""
    follows: str | None = None
    """The metric of which this one is another expression, so that it is no test of its own."""
    note: str | None = None


class SideSummary(Value):
    """One side of a comparison."""

    name: str
    kind: Literal["runs", "reference"]
    runs: tuple[str, ...]
    """Runs whose figures were used, or the published row."""
    left_out: tuple[str, ...] = ()
    """Runs that were not used, and why."""
    source: str | None = None

    @property
    def short_name(self) -> str:
        """The name; a long list of runs by the first of them and their number."""
        first, *others = self.runs or (self.name,)
        if len(self.name) <= MAX_NAME or not others:
            return self.name
        return f"{first} and {len(others)} more"


class Comparison(Value):
    """Two sides held against each other: the candidate is judged, the baseline is the measure.

    Of `compare A B` the baseline is A, of `compare A --against REFERENCE` it is the reference.
    """

    schema_version: int = 1
    verdict: Verdict
    confidence: Literal["low", "normal"]
    why_low: tuple[str, ...] = ()
    """Reasons for a low confidence."""
    sentence: str
    metric: str | None = None
    """The primary metric that ratio, interval and p are of."""
    ratio: float | None = None
    """The candidate's value over the baseline's: of a time, above 1 is slower."""
    low: float | None = None
    high: float | None = None
    p: float | None = None
    n_a: NonNegativeInt
    """Runs used of the first side on the command line."""
    n_b: NonNegativeInt
    """Runs used of the second side; 1 for a reference."""
    margin: NonNegativeFloat
    resolution: NonNegativeFloat = 0.0
    """How much printed digits widen the margin."""
    repeats_needed: NonNegativeInt | None
    """Further repeats a side that a verdict with normal confidence is likely to take; 0 when
    decided, None when more repeats would not help. `repeats_note` says how it was found."""
    repeats_note: str | None = None
    too_good: str | None = None
    """Why an improvement, or the figure itself, is suspicious."""
    differing_keys: tuple[str, ...] = ()
    differences: tuple[KeyDifference, ...] = ()
    unknown_keys: tuple[str, ...] = ()
    """Settings that neither side states."""
    batch_rule: str | None = None
    causes: tuple[str, ...] = ()
    """Versions and surroundings that differ: no obstacle, but a possible cause."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    baseline: SideSummary
    candidate: SideSummary
    metrics: tuple[MetricComparison, ...] = ()

    @property
    def title(self) -> str:
        """Both sides, the candidate first."""
        return f"{self.candidate.short_name} against {self.baseline.short_name}"


def lead_metric(comparison: Comparison) -> MetricComparison | None:
    """Return the metric that ratio and interval are of, None where nothing could be compared."""
    return next((each for each in comparison.metrics if each.metric == comparison.metric), None)


def independent_metrics(comparison: Comparison) -> list[MetricComparison]:
    """Return the metrics that do not only express another one in a different unit."""
    return [metric for metric in comparison.metrics if metric.primary or metric.follows is None]
