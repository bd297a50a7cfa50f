"""Data model of a comparison, as printed by `paceline compare --json`."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from paceline.core.value import NonNegativeInt, Value

MetricVerdict = Literal[
    "same", "slower", "faster", "better", "worse", "differs", "undecided", "unknown"
]
"""Verdict on one metric of the candidate; "better" and "worse" for metrics other than speed."""

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
"""Maximum number of characters of a side's name in a title."""


class KeyDifference(Value):
    """A setting in which the sides differ."""

    key: str
    baseline: str
    candidate: str
    allowed: bool


class SideFigure(Value):
    """One metric of one side."""

    value: float | None
    """Geometric mean over the repeats."""
    n: NonNegativeInt
    """Number of runs behind the value; 1 for a published figure."""
    spread: float | None = None
    """Relative standard deviation between the repeats; needs at least two."""
    values: tuple[float, ...] = ()
    """One value per run, in the order of the side's runs."""


class MetricComparison(Value):
    """One metric of both sides; `ratio` is the candidate's value divided by the baseline's."""

    metric: str
    unit: str
    better: Literal["lower", "higher"] | None
    """Direction that is an improvement; None if neither is."""
    primary: bool
    """True if the verdict depends on this metric."""
    baseline: SideFigure
    candidate: SideFigure
    ratio: float | None = None
    low: float | None = None
    """Lower end of the 95% interval of the ratio over repeats."""
    high: float | None = None
    """Upper end of the interval; None with fewer than three repeats per side."""
    p: float | None = None
    """Two-sided p-value of "no difference beyond rounding", uncorrected."""
    p_corrected: float | None = None
    """The p-value, corrected for the number of metrics tested (false discovery rate)."""
    resolution: NonNegativeFloat = 0.0
    """Largest relative error of the ratio from rounding in print; it widens the margin."""
    verdict: MetricVerdict = "unknown"
    repeats_needed: NonNegativeInt | None = None
    """Further repeats per side for a decision; None if the number cannot be determined."""
    follows: str | None = None
    """The metric that this one expresses in another unit, so that it is not an independent test."""
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
        """The name; a long list of runs is shortened to the first run and the number of others."""
        first, *others = self.runs or (self.name,)
        if len(self.name) <= MAX_NAME or not others:
            return self.name
        return f"{first} and {len(others)} more"


class Comparison(Value):
    """Comparison of a candidate with a baseline.

    For `compare A B` the baseline is A; for `compare A --against REFERENCE` it is the reference.
    """

    schema_version: int = 1
    verdict: Verdict
    confidence: Literal["low", "normal"]
    why_low: tuple[str, ...] = ()
    """Reasons for a low confidence."""
    observed: str = ""
    """Observed difference in one sentence, proven or not; empty if there is none to show."""
    sentence: str
    """The observed difference, what is proven of it, and what would prove more."""
    metric: str | None = None
    """The primary metric of the ratio, the interval and the p-value."""
    ratio: float | None = None
    """The candidate's value divided by the baseline's. For a time, a ratio above 1 is slower."""
    low: float | None = None
    """Lower end of the 95% interval of the ratio."""
    high: float | None = None
    """Upper end of the 95% interval of the ratio."""
    p: float | None = None
    """Two-sided p-value of "no difference beyond rounding"."""
    n_a: NonNegativeInt
    """Number of runs used of the first side on the command line."""
    n_b: NonNegativeInt
    """Number of runs used of the second side; 1 for a reference."""
    margin: NonNegativeFloat
    """Largest relative difference that does not matter."""
    resolution: NonNegativeFloat = 0.0
    """Relative amount by which rounding in print widens the margin."""
    repeats_needed: NonNegativeInt | None
    """Further repeats per side that are likely to give a verdict with normal confidence; 0 when
    decided, None when more repeats would not help. `repeats_note` states how the number was
    determined."""
    repeats_note: str | None = None
    too_good: str | None = None
    """Reason why an improvement, or the figure itself, is suspicious."""
    differing_keys: tuple[str, ...] = ()
    """Settings in which the sides differ."""
    differences: tuple[KeyDifference, ...] = ()
    """The same settings with the values of both sides."""
    unknown_keys: tuple[str, ...] = ()
    """Settings that neither side states."""
    batch_rule: str | None = None
    """Rule by which the batches were compared."""
    causes: tuple[str, ...] = ()
    """Software versions and system settings that differ: possible causes of a difference."""
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
    """Return the metric of the ratio and interval, or None where nothing could be compared."""
    return next((each for each in comparison.metrics if each.metric == comparison.metric), None)


def independent_metrics(comparison: Comparison) -> list[MetricComparison]:
    """Return the metrics that do not only express another one in a different unit."""
    return [metric for metric in comparison.metrics if metric.primary or metric.follows is None]
