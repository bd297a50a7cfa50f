"""Verdict on pairs of runs at the latest interim analysis, and the next action."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from paceline.compare.judge import ONE_LEVEL, has_level_shift, judge
from paceline.compare.judgement import (
    LIKELY,
    LIKELY_WORD,
    Comparison,
    KeyDifference,
    MetricVerdict,
    SideSummary,
    Verdict,
    percent_change,
)
from paceline.compare.metric_comparison import metric_verdict
from paceline.compare.sequential.interim_analysis import (
    ERROR,
    MIN_PAIRS,
    Design,
    PairsAnalysis,
    analyze_pairs,
)
from paceline.compare.sides import Pair
from paceline.core.metrics import metric_class
from paceline.core.units import percent, pluralize
from paceline.core.value import NonNegativeInt, PositiveInt, Value

EndReason = Literal[
    "decided",
    "futile",
    "all pairs measured",
    "continue",
    "interrupted",
    "failed",
    "not comparable",
    "not interleaved",
]
"""Reason why no further pairs are measured; `continue` requests more."""
END_REASONS: Mapping[str, EndReason] = {
    "continue": "continue",
    "futile": "futile",
    "undecided": "all pairs measured",
}
"""Reasons by the conclusion of the last interim analysis; all others decide the series."""
REASON_OF_REFUSAL: Mapping[str, EndReason] = {
    "not comparable": "not comparable",
    "invalid": "failed",
}
"""Reasons by the verdict on sides without a figure to compare."""
NOT_INTERLEAVED = (
    "the runs of each pair did not follow each other, so a change of the machine would look like a "
    "difference; more pairs do not fix that: start a new, interleaved series (A B, then B A)"
)


class InterimAnalysis(Value):
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
    end_reason: EndReason
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
    max_pairs: PositiveInt
    """Maximum number of pairs, over which the error is spent."""
    error: float = ERROR
    margin: float
    resolution: float = 0.0
    analyses: tuple[InterimAnalysis, ...] = ()
    unpaired_runs: tuple[str, ...] = ()
    """Runs without a partner."""
    differing_keys: tuple[str, ...] = ()
    differences: tuple[KeyDifference, ...] = ()
    causes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    baseline: SideSummary
    candidate: SideSummary
    next_action: str | None = None
    """Next action to get further pairs; None when there is nothing to do."""


def judge_pairs(
    sides: Pair,
    design: Design,
    *,
    allowed: Collection[str] = (),
    metrics: Sequence[str] = (),
    interleaved: bool = True,
    unpaired_runs: Sequence[str] = (),
) -> SequentialComparison:
    """Compare two sides whose n-th runs form a pair each, the oldest first.

    Pairs that were not interleaved (`in_turns`) decide nothing. Pairs beyond the design's maximum
    are ignored. Only the first of several metrics is used.
    """
    comparison = judge(
        sides.baseline, sides.candidate, margin=design.margin, allowed=allowed, metrics=metrics[:1]
    )
    num_pairs = min(len(sides.baseline.valid_runs), design.max_pairs)
    blank = SequentialComparison(
        verdict="undecided",
        end_reason="continue",
        confidence=comparison.confidence,
        why_low=comparison.why_low,
        sentence="",
        metric=comparison.metric,
        pairs=num_pairs,
        max_pairs=design.max_pairs,
        margin=design.margin,
        resolution=comparison.resolution,
        unpaired_runs=tuple(unpaired_runs),
        differing_keys=comparison.differing_keys,
        differences=comparison.differences,
        causes=comparison.causes,
        warnings=comparison.warnings,
        baseline=comparison.baseline,
        candidate=comparison.candidate,
    )
    has_runs = bool(sides.baseline.members and sides.candidate.members)
    if has_runs and comparison.metric is None and comparison.verdict in REASON_OF_REFUSAL:
        fields = {
            "verdict": comparison.verdict,
            "end_reason": REASON_OF_REFUSAL[comparison.verdict],
            "sentence": comparison.sentence,
        }
        return blank.model_copy(update=fields)
    if not interleaved:
        text = f"Undecided: {NOT_INTERLEAVED}."
        return blank.model_copy(update={"end_reason": "not interleaved", "sentence": text})
    if num_pairs < MIN_PAIRS:
        num_pairs_text = pluralize(num_pairs, "pair")
        text = f"Undecided: {num_pairs_text} so far, and the first analysis is after {MIN_PAIRS}."
        return blank.model_copy(update={"sentence": text})
    return _analyzed_result(blank, sides, design, comparison)


def _analyzed_result(
    blank: SequentialComparison, sides: Pair, design: Design, comparison: Comparison
) -> SequentialComparison:
    name = comparison.metric or ""
    values = [
        [value for value in side.figures(name, averaged=False)[: design.max_pairs] if value]
        for side in sides.each
    ]
    if any(len(column) != blank.pairs for column in values):
        text = f"Not judged: {name} is unknown for some runs."
        return blank.model_copy(
            update={"verdict": "invalid", "end_reason": "failed", "sentence": text}
        )
    rounded_design = Design(design.max_pairs, design.margin, comparison.resolution)
    looks = analyze_pairs(values[0], values[1], rounded_design)
    several_levels = metric_class(name).is_speed and has_level_shift(sides, design.margin)
    if several_levels:
        looks = [replace(k, conclusion="futile") if k.conclusion == "same" else k for k in looks]
    last = looks[-1]
    verdict: Verdict = metric_verdict(name, last.change)  # pyright: ignore[reportAssignmentType]
    if last.conclusion in ("futile", "undecided") and not several_levels:
        verdict = LIKELY_WORD.get(comparison.verdict, verdict)
    text = _sentence(sides, name, verdict, last, rounded_design)
    if several_levels and last.conclusion == "futile":
        text += f" To decide, {ONE_LEVEL}."
    return blank.model_copy(
        update={
            "verdict": verdict,
            "end_reason": END_REASONS.get(last.conclusion, "decided"),
            "sentence": text,
            "ratio": last.ratio,
            "low": last.low,
            "high": last.high,
            "largest_difference": last.largest,
            "analyses": tuple(
                InterimAnalysis(
                    pairs=look.num_pairs,
                    ratio=look.ratio,
                    low=look.low,
                    high=look.high,
                    level=look.level,
                    verdict=metric_verdict(name, look.change),
                )
                for look in looks
            ),
        }
    )


def _sentence(
    sides: Pair, metric: str, verdict: Verdict, look: PairsAnalysis, design: Design
) -> str:
    base, cand = sides.baseline.name, sides.candidate.name
    figures = (
        f"{metric} {percent_change(look.ratio)} ({percent_change(look.low)} to "
        f"{percent_change(look.high)}, 95% over all analyses) after "
        f"{pluralize(look.num_pairs, 'pair')}"
    )
    within = percent(design.margin + design.resolution, 2 if design.resolution else 1)
    possible = f"a difference of up to {percent(look.largest, 1)} is still possible"
    heads = {
        "same": f"{cand} and {base} are the same within {within}",
        "continue": "Undecided so far",
        "futile": f"Undecided, and {design.max_pairs} pairs are unlikely to decide it",
        "undecided": f"Undecided after all {pluralize(look.num_pairs, 'pair')}",
    }
    if verdict in LIKELY:
        return f"{cand} is {verdict} than {base}. {heads[look.conclusion]}: {figures}; {possible}."
    if look.conclusion in heads:
        return f"{heads[look.conclusion]}: {figures}; {possible}."
    return f"{cand} is {verdict} than {base}: {figures}."
