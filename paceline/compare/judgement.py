"""Result of a comparison, as printed by `paceline compare --json`, and its verdict in words.

Reports of `paceline compare`, of pairs of runs, of repeats and of one run next to published rows,
and their pages, show a verdict by `verdict_label` and `verdict_tone`, with its stored sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import NonNegativeFloat

from paceline.compare.comparability import KeyDifference
from paceline.compare.significance import MAX_FURTHER_REPEATS, MIN_REPEATS
from paceline.core.units import percent, pluralize, significant
from paceline.core.value import NonNegativeInt, Value

Outcome = Literal[
    "same",
    "slower",
    "faster",
    "likely slower",
    "likely faster",
    "better",
    "worse",
    "differs",
    "undecided",
]
"""Outcome of a comparison; "better" and "worse" for metrics other than speed."""
MetricVerdict = Literal[Outcome, "unknown"]
"""Verdict on one metric of the candidate."""
Verdict = Literal[Outcome, "not comparable", "invalid"]

MAX_NAME = 40
"""Maximum number of characters of a side's name in a title."""


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
    """Upper end of the interval; None if the run-to-run variation is unknown."""
    p: float | None = None
    """Two-sided p-value of "no difference beyond rounding", uncorrected."""
    p_corrected: float | None = None
    """The p-value, corrected for the number of metrics tested (false discovery rate)."""
    resolution: NonNegativeFloat = 0.0
    """Largest relative error of the ratio from rounding in print; it widens the margin."""
    verdict: MetricVerdict = "unknown"
    repeats_needed: NonNegativeInt | None = None
    """Further repeats per side for a decision; None if the number cannot be determined."""
    by_known_variation: bool = False
    """True if the verdict uses the variation of the machine or of its class."""
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
    evidence: str = ""
    """Share of pairs with such a difference by chance, and the data; empty for enough repeats."""
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
    """Settings that a side does not state. They are assumed to be equal."""
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


LABELS: dict[str, str] = {
    "same": "✓ same",
    "faster": "▲ faster",
    "better": "▲ better",
    "likely faster": "△ likely faster",
    "likely slower": "▽ likely slower",
    "likely better": "△ likely better",
    "likely worse": "▽ likely worse",
    "slower": "▼ slower",
    "worse": "▼ worse",
    "differs": "≠ differs",
    "undecided": "? undecided",
    "not comparable": "✕ not comparable",
    "invalid": "✕ no valid figure",
    "pass": "✓ as fast as the reference",
    "none": "measured, no reference",
}
"""Labels by the verdict of a comparison, or by the kind of verdict of one run."""

SMALLEST_SHOWN = 5e-5
"""Relative difference below which two values are reported as equal."""

GOOD = frozenset({"same", "faster", "better", "pass"})
LIKELY = frozenset({"likely slower", "likely faster", "likely worse", "likely better"})
LIKELY_WORD: dict[str, Verdict] = {
    "slower": "likely slower",
    "likely slower": "likely slower",
    "faster": "likely faster",
    "likely faster": "likely faster",
}
"""Verdict on a series that a sequential test left undecided, by the verdict on all its runs."""
REFUSED = frozenset({"not comparable", "invalid"})
PLAIN = frozenset({"undecided", "none", *LIKELY})


def verdict_label(verdict: str, *, suspicious: bool = False, low_confidence: bool = False) -> str:
    """Return a verdict in a few words: `▲ faster, suspicious (low confidence)`."""
    doubt = ", suspicious" if suspicious else ""
    low = " (low confidence)" if low_confidence and verdict not in REFUSED else ""
    return f"{LABELS[verdict]}{doubt}{low}"


def verdict_tone(verdict: str) -> Literal["good", "alert", "plain"]:
    """Return the tone in which a verdict is coloured."""
    return "good" if verdict in GOOD else "plain" if verdict in PLAIN else "alert"


def observed_difference(names: tuple[str, str], lead: MetricComparison) -> str:
    """Return the difference of the candidate from the baseline, proven or not.

    `names` are those of the baseline and the candidate: `b is 8.0% slower than a: 1.804 s vs 1.670
    s.`
    """
    base, cand = names
    values = [
        f"{significant(side.value, 4)} {lead.unit}" if side.value is not None else "unknown"
        for side in (lead.candidate, lead.baseline)
    ]
    ratio = lead.ratio or 1.0
    size = percent(abs(ratio - 1), 1 if abs(ratio - 1) >= 0.01 else 2)
    speed = lead.metric == "step_time_s"
    word = ("slower" if speed else "higher") if ratio > 1 else ("faster" if speed else "lower")
    if abs(ratio - 1) < SMALLEST_SHOWN:
        difference = f"is as fast as {base}" if speed else f"is the same as of {base}"
    else:
        difference = (
            f"is {size} {word} than {base}" if speed else f"is {size} {word} than of {base}"
        )
    subject = cand if speed else f"{lead.metric} of {cand}"
    return f"{subject} {difference}: {values[0]} vs {values[1]}."


def proof(
    lead: MetricComparison,
    verdict: Verdict,
    margin: float,
    sizes: Mapping[str, int],
    repeats_needed: int | None,
    evidence: str = "",
) -> str:
    """Return what is proven of the observed difference, and what would prove more.

    `sizes` are the numbers of runs of each side that can be repeated, by its name. `evidence` says
    how rare such a difference is by chance.
    """
    within = percent(margin + lead.resolution, 2 if lead.resolution else 1)
    interval = ""
    if lead.low is not None and lead.high is not None:
        interval = f"95% interval {percent_change(lead.low)} to {percent_change(lead.high)}, "
    why = f"{interval}margin {within}"
    if verdict != "undecided" and verdict not in LIKELY:
        same = verdict == "same"
        if interval:
            head = "Beyond chance" if evidence else f"Proven{' the same' if same else ''}"
            return f"{head}: {why}.{f' {evidence}' if evidence else ''}"
        return f"{'Within' if same else 'More than'} the margin of {within}."
    missing_runs = dict.fromkeys(sizes, repeats_needed or 0)
    if min(sizes.values()) < MIN_REPEATS and (evidence or not interval):
        missing_runs = {name: max(0, MIN_REPEATS - n) for name, n in sizes.items()}
    if not interval and min(sizes.values()) < MIN_REPEATS:
        counts = dict.fromkeys(sizes.values())
        runs = " and ".join(pluralize(n, "run") for n in counts)
        each = " each" if len(counts) < len(sizes) else ""
        why = f"{runs}{each}, so run-to-run variation is unknown"
    head = "Likely, not proven" if verdict in LIKELY else "Not proven"
    return f"{head}: {why}.{f' {evidence}' if evidence else ''}{_more_runs(missing_runs)}"


def _more_runs(missing_runs: Mapping[str, int]) -> str:
    """Return advice to run more: ` Run 2 more of each, ...`; empty if no number would help."""
    numbers = set(missing_runs.values())
    if numbers <= {0}:
        return ""
    if len(numbers) == 1:
        n = numbers.pop()
        at_least = "at least " * (n >= MAX_FURTHER_REPEATS)
        each = " of each, alternating (A B A B)" if len(missing_runs) > 1 else ""
        return f" Run {at_least}{n} more{each}."
    return f" Run {' and '.join(f'{n} more of {name}' for name, n in missing_runs.items() if n)}."


def change_text(comparison: MetricComparison) -> str:
    """Return both values, the change and its interval: `0.2356 s vs 0.2310 s, +2.0% (...)`."""
    values = [
        f"{significant(side.value, 4)} {comparison.unit}" if side.value is not None else "unknown"
        for side in (comparison.candidate, comparison.baseline)
    ]
    if comparison.ratio is None:
        return f"{comparison.metric} {values[0]} vs {values[1]}"
    text = f"{comparison.metric} {values[0]} vs {values[1]}, {percent_change(comparison.ratio)}"
    if comparison.low is None or comparison.high is None:
        return text
    low, high = percent_change(comparison.low), percent_change(comparison.high)
    return f"{text} (95% interval {low} to {high})"


def percent_change(ratio: float) -> str:
    """Return a ratio as a change: `1.0204` is `+2.04%`."""
    change = 100 * (ratio - 1)
    return f"{round(change, 2) + 0.0:+.2f}%" if abs(change) < 10 else f"{change:+.1f}%"
