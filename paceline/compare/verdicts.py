"""Verdicts in words: labels, tones, and sentences with the figures.

Reports of `paceline compare`, of pairs of runs, of repeats and of one run next to published rows,
and their pages, show a verdict by `verdict_label` and `verdict_tone`, with its stored sentence.
"""

from __future__ import annotations

from typing import Literal

from paceline.compare.judgement import MetricComparison, Verdict
from paceline.compare.sides import Pair
from paceline.core.metrics import metric_class
from paceline.core.units import percent, significant

LABELS: dict[str, str] = {
    "same": "✓ same",
    "faster": "▲ faster",
    "better": "▲ better",
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

GOOD = frozenset({"same", "faster", "better", "pass"})
PLAIN = frozenset({"undecided", "none"})


def verdict_label(verdict: str, *, suspicious: bool = False, low_confidence: bool = False) -> str:
    """Return a verdict in a few words: `▲ faster, suspicious (low confidence)`."""
    doubt = ", suspicious" if suspicious else ""
    return f"{LABELS[verdict]}{doubt}{' (low confidence)' if low_confidence else ''}"


def verdict_tone(verdict: str) -> Literal["good", "alert", "plain"]:
    """Return the tone in which a verdict is coloured."""
    return "good" if verdict in GOOD else "plain" if verdict in PLAIN else "alert"


def sentence(sides: Pair, lead: MetricComparison, verdict: Verdict, margin: float) -> str:
    """Return the verdict in one sentence with its figures."""
    base, cand = sides.baseline.name, sides.candidate.name
    if lead.ratio is None or verdict == "invalid":
        return f"Not judged: {lead.metric} is not known ({lead.note or 'no value'})."
    within = percent(margin + lead.resolution, 2 if lead.resolution else 1)
    good = "fast" if metric_class(lead.metric).is_speed else "good"
    opening = {
        "same": f"{cand} is as {good} as {base} within {within}",
        "undecided": f"Undecided whether {cand} differs from {base} by more than {within}",
        "differs": f"{cand} differs from {base}",
    }.get(verdict, f"{cand} is {verdict} than {base}")
    return f"{opening}: {change_text(lead)}."


def change_text(comparison: MetricComparison) -> str:
    """Return both values, the change and its interval: `0.2356 s against 0.2310 s, +2.0% (...)`."""
    values = [
        f"{significant(side.value, 4)} {comparison.unit}" if side.value is not None else "unknown"
        for side in (comparison.candidate, comparison.baseline)
    ]
    if comparison.ratio is None:
        return f"{comparison.metric} {values[0]} against {values[1]}"
    text = (
        f"{comparison.metric} {values[0]} against {values[1]}, {percent_change(comparison.ratio)}"
    )
    if comparison.low is None or comparison.high is None:
        return text
    low, high = percent_change(comparison.low), percent_change(comparison.high)
    return f"{text} (95% interval {low} to {high})"


def percent_change(ratio: float) -> str:
    """Return a ratio as a change: `1.0204` is `+2.04%`."""
    change = 100 * (ratio - 1)
    return f"{round(change, 2) + 0.0:+.2f}%" if abs(change) < 10 else f"{change:+.1f}%"
