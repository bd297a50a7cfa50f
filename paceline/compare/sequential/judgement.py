"""Verdict on pairs of runs at the latest interim analysis, and the next action."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from paceline.compare.judge import ONE_LEVEL, has_level_shift, judge
from paceline.compare.judgement import (
    Comparison,
    KeyDifference,
    MetricVerdict,
    SideSummary,
    Verdict,
)
from paceline.compare.metric_comparison import metric_verdict
from paceline.compare.sequential.interim_analysis import (
    ERROR,
    FEWEST_PAIRS,
    Design,
    PairsLook,
    looks_along,
)
from paceline.compare.sides import Pair
from paceline.compare.verdicts import percent_change
from paceline.core.metrics import metric_class
from paceline.core.units import percent, pluralize
from paceline.core.value import NonNegativeInt, PositiveInt, Value

Ended = Literal[
    "decided",
    "futile",
    "all pairs made",
    "goes on",
    "interrupted",
    "failed",
    "not comparable",
    "not in turns",
]
"""Reason why there are no further pairs; `goes on` requests more."""
NOT_IN_TURNS = (
    "the runs of each pair did not follow each other, and a machine that changed meanwhile would "
    "look the same; no further pairs mend that: begin a new series in turns (A B, then B A)"
)


class SequentialLook(Value):
    """Result of one interim analysis."""

    pairs: PositiveInt
    ratio: float
    """Geometric mean of candidate over baseline."""
    low: float
    """Lower end of the interval that, over all interim analyses together, contains the true ratio
    in 95% of comparisons."""
    high: float
    """Upper end of the interval."""
    level: float
    """Share of the error that this interim analysis may spend."""
    verdict: MetricVerdict


class SequentialComparison(Value):
    """Comparison of two sides while their runs are made in pairs: `compare --sequential`.

    The candidate is compared with the baseline. For any number of interim analyses, identical sides
    are called slower or faster in at most `error` of the comparisons.
    """

    schema_version: int = 1
    verdict: Verdict
    ended: Ended
    confidence: Literal["low", "normal"] = "normal"
    why_low: tuple[str, ...] = ()
    sentence: str
    metric: str | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    largest_difference: float | None = None
    """Largest difference that is still possible, up or down, as a fraction of the baseline."""
    pairs: NonNegativeInt
    """Number of pairs with a figure on both sides."""
    most_pairs: PositiveInt
    """Maximum number of pairs, over which the error is spent."""
    error: float = ERROR
    margin: float
    resolution: float = 0.0
    looks: tuple[SequentialLook, ...] = ()
    unpaired: tuple[str, ...] = ()
    """Runs without a partner."""
    differing_keys: tuple[str, ...] = ()
    differences: tuple[KeyDifference, ...] = ()
    causes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    baseline: SideSummary
    candidate: SideSummary
    go_on: str | None = None
    """Next action to get further pairs; None when there is nothing to do."""


def judge_pairs(
    sides: Pair,
    design: Design,
    *,
    allowed: Collection[str] = (),
    metrics: Sequence[str] = (),
    in_turns: bool = True,
    unpaired: Sequence[str] = (),
) -> SequentialComparison:
    """Compare two sides whose n-th runs form a pair each, the oldest first.

    Pairs that were not interleaved (`in_turns`) decide nothing. Pairs beyond the design's maximum
    are ignored. Only the first of several metrics is used.
    """
    comparison = judge(
        sides.baseline, sides.candidate, margin=design.margin, allowed=allowed, metrics=metrics[:1]
    )
    num_pairs = min(len(sides.baseline.valid_runs), design.most_pairs)
    blank = SequentialComparison(
        verdict="undecided",
        ended="goes on",
        confidence=comparison.confidence,
        why_low=comparison.why_low,
        sentence="",
        metric=comparison.metric,
        pairs=num_pairs,
        most_pairs=design.most_pairs,
        margin=design.margin,
        resolution=comparison.resolution,
        unpaired=tuple(unpaired),
        differing_keys=comparison.differing_keys,
        differences=comparison.differences,
        causes=comparison.causes,
        warnings=comparison.warnings,
        baseline=comparison.baseline,
        candidate=comparison.candidate,
    )
    if refused := _refused(comparison, sides):
        return blank.model_copy(update=refused)
    if not in_turns:
        text = f"Undecided: {NOT_IN_TURNS}."
        return blank.model_copy(update={"ended": "not in turns", "sentence": text})
    if num_pairs < FEWEST_PAIRS:
        made = pluralize(num_pairs, "pair")
        text = f"Undecided: {made} so far, and the first look is after {FEWEST_PAIRS}."
        return blank.model_copy(update={"sentence": text})
    return _looked_at(blank, sides, design, comparison)


def _refused(comparison: Comparison, sides: Pair) -> dict[str, object] | None:
    if not sides.baseline.members or not sides.candidate.members:
        return None
    if comparison.verdict in ("not comparable", "invalid") and comparison.metric is None:
        return {
            "verdict": comparison.verdict,
            "ended": "not comparable" if comparison.verdict == "not comparable" else "failed",
            "sentence": comparison.sentence,
        }
    return None


def _looked_at(
    blank: SequentialComparison, sides: Pair, design: Design, comparison: Comparison
) -> SequentialComparison:
    name = comparison.metric or ""
    values = [
        [value for value in side.figures(name, averaged=False)[: design.most_pairs] if value]
        for side in sides.each
    ]
    if any(len(column) != blank.pairs for column in values):
        text = f"Not judged: {name} is not known of every run."
        return blank.model_copy(update={"verdict": "invalid", "ended": "failed", "sentence": text})
    rounded = Design(design.most_pairs, design.margin, comparison.resolution)
    looks = looks_along(values[0], values[1], rounded)
    several_levels = metric_class(name).is_speed and has_level_shift(sides, design.margin)
    if several_levels:
        looks = [replace(k, answer="futile") if k.answer == "same" else k for k in looks]
    last = looks[-1]
    verdict = metric_verdict(name, last.change)
    text = _sentence(sides, name, verdict, last, rounded)
    if several_levels and last.answer == "futile":
        text += f" What decides: {ONE_LEVEL}."
    return blank.model_copy(
        update={
            "verdict": verdict,
            "ended": _ended(last),
            "sentence": text,
            "ratio": last.ratio,
            "low": last.low,
            "high": last.high,
            "largest_difference": last.largest,
            "looks": tuple(_look(name, look) for look in looks),
        }
    )


def _ended(look: PairsLook) -> Ended:
    match look.answer:
        case "goes on":
            return "goes on"
        case "futile":
            return "futile"
        case "undecided":
            return "all pairs made"
        case _:
            return "decided"


def _look(name: str, look: PairsLook) -> SequentialLook:
    return SequentialLook(
        pairs=look.num_pairs,
        ratio=look.ratio,
        low=look.low,
        high=look.high,
        level=look.level,
        verdict=metric_verdict(name, look.change),
    )


def _sentence(
    sides: Pair, metric: str, verdict: MetricVerdict, look: PairsLook, design: Design
) -> str:
    base, cand = sides.baseline.name, sides.candidate.name
    figures = (
        f"{metric} {percent_change(look.ratio)} ({percent_change(look.low)} to "
        f"{percent_change(look.high)}, 95% over all looks) after "
        f"{pluralize(look.num_pairs, 'pair')}"
    )
    within = percent(design.margin + design.resolution, 2 if design.resolution else 1)
    possible = f"a difference of up to {percent(look.largest, 1)} is still possible"
    match look.answer:
        case "same":
            return f"{cand} and {base} are the same within {within}: {figures}; {possible}."
        case "goes on":
            return f"Undecided so far: {figures}; {possible}."
        case "futile":
            return (
                f"Undecided, and {design.most_pairs} pairs would hardly decide it: {figures}; "
                f"{possible}."
            )
        case "undecided":
            return (
                f"Undecided after all {pluralize(look.num_pairs, 'pair')}: {figures}; {possible}."
            )
        case _:
            return f"{cand} is {verdict} than {base}: {figures}."
