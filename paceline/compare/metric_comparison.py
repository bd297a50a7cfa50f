"""Comparison of every metric of two sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log

import numpy as np

from paceline.compare.few_runs import FewRunsRule
from paceline.compare.judgement import MetricComparison, MetricVerdict, SideFigure
from paceline.compare.sides import ComparisonSide, Pair
from paceline.compare.significance import (
    MIN_REPEATS,
    Change,
    RatioEstimate,
    bounded_exp,
    compare_repeats,
    compare_with_figure,
    compare_with_prior,
    correct_p_values,
    decide,
    decide_by_margin,
    decide_few,
    further_repeats,
    with_occasions,
)
from paceline.core.flops import without_recompute
from paceline.core.metrics import METRICS, OVERHEAD, metric_class

NO_RULE = FewRunsRule()
IDENTICAL = "identical values in all repeats: rounded or counted, so the spread is unknown"
UNKNOWN_BETWEEN = "its variation between days, hosts or blocks of runs is unknown"


@dataclass(frozen=True)
class RatioTest:
    """Result of comparing the values of one metric."""

    ratio: float
    change: Change
    low: float | None = None
    high: float | None = None
    p: float | None = None
    repeats_needed: int | None = 0
    note: str | None = None
    by_known_variation: bool = False


def compare_metrics(
    baseline: ComparisonSide,
    candidate: ComparisonSide,
    primary: Sequence[str],
    margin: float,
    rule: FewRunsRule,
) -> tuple[MetricComparison, ...]:
    """Compare every metric that both sides report, the primary ones first.

    The p-values are corrected together. Metrics that only express another one in a different unit
    are not counted as tests.
    """
    names = [*primary, *(name for name in METRICS if name not in primary)]
    sides = Pair(baseline, candidate)
    comparisons = [_compare(name, sides, name in primary, margin, rule) for name in names]
    comparisons_with_values = [
        comparison for comparison in comparisons if comparison.primary or _has_values(comparison)
    ]
    independent_tests = [
        comparison
        for comparison in comparisons_with_values
        if comparison.p is not None and (comparison.primary or comparison.follows is None)
    ]
    p_corrected = dict(
        zip(
            [t.metric for t in independent_tests],
            correct_p_values([t.p or 0.0 for t in independent_tests]),
            strict=True,
        )
    )
    return tuple(
        comparison.model_copy(update={"p_corrected": p_corrected.get(comparison.metric)})
        for comparison in comparisons_with_values
    )


def compare_values(
    baseline: Sequence[float],
    candidate: Sequence[float],
    margin: float,
    *,
    resolution: float = 0.0,
    published: bool = False,
    known_error: float = 0.0,
    steps_error: float = 0.0,
    rule: FewRunsRule = NO_RULE,
    is_count: bool = False,
) -> RatioTest:
    """Compare the candidate with the baseline, given one positive value per run.

    `published` means that the baseline is one published figure. Three repeats per side that
    alternate are tested by their own variation, and together with the prior of the `rule`: the
    surer result counts, so that a third run never hides what two runs show. With fewer, or if the
    sides were measured on different occasions or in blocks, the `rule` decides. Without a rule,
    fewer repeats are undecided, except for values that are counted (bytes, for example) rather than
    timed: the margin decides those, and `known_error` is then the argument of `decide_by_margin`.
    `steps_error` is the error of few runs that short or noisy runs add to the run-to-run variation.
    A metric that the prior does not cover is undecided if the sides do not alternate.
    """
    log_ratio = float(np.mean(np.log(candidate)) - np.mean(np.log(baseline)))
    sizes = [len(candidate)] if published else [len(baseline), len(candidate)]
    few = min(sizes) < MIN_REPEATS
    prior = None if is_count else rule.prior
    is_apart = bool(rule.confounding or rule.blocks)
    by_rule = None
    if prior and rule.decides:
        by_rule = compare_with_prior(baseline, candidate, prior, published)
        if few:
            error = hypot(by_rule.standard_error, steps_error)
            by_rule = replace(by_rule, standard_error=error)
        if few or is_apart:
            wider = with_occasions(by_rule, rule.confounding, prior, rule.blocks)
            change = decide_few(wider, margin, resolution, may_be_same=not few or rule.is_own)
            return _ratio_test(by_rule, wider, change, sizes, margin, resolution, by_prior=True)
    if few:
        change = decide_by_margin(log_ratio, known_error, margin, resolution)
        change = change if is_count else "undecided"
        return RatioTest(bounded_exp(log_ratio), change, repeats_needed=MIN_REPEATS - min(sizes))
    estimate = (
        compare_with_figure(baseline[0], candidate)
        if published
        else compare_repeats(baseline, candidate)
    )
    wider = estimate
    if is_apart and not prior and not is_count:
        return RatioTest(
            estimate.ratio,
            "undecided",
            *estimate.interval(),
            estimate.p_value(resolution),
            repeats_needed=min(sizes),
            note=UNKNOWN_BETWEEN,
        )
    if prior and is_apart:
        wider = with_occasions(estimate, rule.confounding, prior, rule.blocks)
    elif estimate.identical:
        change = decide_by_margin(log_ratio, 0.0, margin, resolution)
        return RatioTest(estimate.ratio, change, note=IDENTICAL)
    change = decide(wider, margin, resolution)
    if change == "undecided" and by_rule:
        by_prior = decide_few(by_rule, margin, resolution, may_be_same=False)
        if by_prior != "undecided":
            return _ratio_test(
                estimate, by_rule, by_prior, sizes, margin, resolution, by_prior=True
            )
    return _ratio_test(estimate, wider, change, sizes, margin, resolution)


def _ratio_test(
    estimate: RatioEstimate,
    wider: RatioEstimate,
    change: Change,
    sizes: Sequence[int],
    margin: float,
    resolution: float,
    *,
    by_prior: bool = False,
) -> RatioTest:
    """Return the result by the estimate `wider`.

    `estimate` is the precision that further, interleaved repeats would have; it gives their number.
    """
    if change in ("higher", "lower", "same"):
        repeats_needed: int | None = 0
    elif min(sizes) < MIN_REPEATS:
        repeats_needed = MIN_REPEATS - min(sizes)
    elif wider is not estimate and decide(estimate, margin, resolution) != "undecided":
        repeats_needed = min(sizes)
    else:
        repeats_needed = further_repeats(estimate, min(sizes), max(sizes), margin, resolution)
    p = wider.p_value(resolution)
    return RatioTest(
        wider.ratio, change, *wider.interval(), p, repeats_needed, by_known_variation=by_prior
    )


def _compare(
    name: str, sides: Pair, primary: bool, margin: float, rule: FewRunsRule
) -> MetricComparison:
    baseline, candidate = sides.each
    averaged = baseline.averaged or candidate.averaged
    ours, theirs = (side.figures(name, averaged) for side in (baseline, candidate))
    blank = MetricComparison(
        metric=name,
        unit=_unit(name, baseline, candidate),
        better=metric_class(name).better,
        primary=primary,
        baseline=_side_figure(ours),
        candidate=_side_figure(theirs),
        follows=metric_class(name).follows,
    )
    base, cand = _positive(ours), _positive(theirs)
    if base is None or cand is None:
        return blank.model_copy(update={"note": _why_unknown(name, baseline, candidate)})
    if note := _conventions(name, baseline, candidate):
        return blank.model_copy(update={"note": note})
    speed = metric_class(name).is_speed
    resolution = baseline.rounding + candidate.rounding if speed else 0.0
    errors = baseline.within_run_error(name), candidate.within_run_error(name)
    contrast = compare_values(
        base,
        cand,
        margin,
        resolution=resolution,
        published=baseline.published,
        known_error=hypot(*errors),
        steps_error=hypot(baseline.steps_error(name), candidate.steps_error(name)),
        rule=_rule_for(name, rule),
        is_count=not speed and metric_class(name) is not OVERHEAD,
    )
    return blank.model_copy(
        update={
            **{
                key: getattr(contrast, key)
                for key in (
                    "ratio",
                    "low",
                    "high",
                    "p",
                    "repeats_needed",
                    "by_known_variation",
                )
            },
            "note": contrast.note if speed or contrast.note != IDENTICAL else None,
            "resolution": resolution,
            "verdict": metric_verdict(name, contrast.change),
        }
    )


def _rule_for(name: str, rule: FewRunsRule) -> FewRunsRule:
    """Return the rule for a metric.

    The prior decides the step time and its rates, widens the intervals of other metrics of the
    steady window, and does not hold for the rest: start-up and the first step, which compiles.
    """
    if is_timed(name):
        return rule
    is_in_window = name not in METRICS or METRICS[name].in_window
    return replace(rule, decides=False, prior=rule.prior if is_in_window else None)


def is_timed(name: str) -> bool:
    """Return whether the published variation of step times applies to this metric."""
    return "step_time_s" in (name, metric_class(name).follows)


def _has_values(comparison: MetricComparison) -> bool:
    return comparison.baseline.value is not None and comparison.candidate.value is not None


def metric_verdict(name: str, change: Change) -> MetricVerdict:
    """Return the verdict for a change of the metric `name`."""
    if change in ("same", "undecided"):
        return change
    improves = metric_class(name).better
    if improves is None:
        return "differs"
    likely, good = change.startswith("likely"), change.endswith(improves)
    if metric_class(name).is_speed:
        word = "faster" if good else "slower"
        return f"likely {word}" if likely else word  # pyright: ignore[reportReturnType]
    return "better" if good else "worse"


def _side_figure(values: Sequence[float | None]) -> SideFigure:
    numbers = [value for value in values if value is not None]
    positive = _positive(values)
    if positive is None:
        mean = float(np.mean(numbers)) if numbers and len(numbers) == len(values) else None
        return SideFigure(value=mean, n=len(numbers), values=tuple(numbers))
    logs = [log(value) for value in positive]
    # A standard deviation of logarithms is relative already (for small s, exp(s) - 1 = s).
    spread = float(np.std(logs, ddof=1)) if len(logs) > 1 else None
    return SideFigure(
        value=exp(float(np.mean(logs))), n=len(logs), spread=spread, values=tuple(positive)
    )


def _positive(values: Sequence[float | None]) -> list[float] | None:
    """Return the values if all are known and above zero, else None: only then is there a ratio."""
    positive = [value for value in values if value is not None and value > 0]
    return positive if values and len(positive) == len(values) else None


def _unit(name: str, baseline: ComparisonSide, candidate: ComparisonSide) -> str:
    metrics = [m for side in (baseline, candidate) for m in side.metric(name) if m]
    return metrics[0].unit if metrics else ""


def _why_unknown(name: str, baseline: ComparisonSide, candidate: ComparisonSide) -> str | None:
    """Return why a metric has no ratio, or None when no run of a side reports it."""
    for side in (baseline, candidate):
        for member, metric in zip(side.valid_runs, side.metric(name), strict=True):
            if metric is not None and metric.value is None:
                return f"{member.name}: {metric.note or 'not measured'}"
            if metric is not None and metric.value is not None and metric.value <= 0:
                return "values of zero and below have no ratio"
    missing = [side.name for side in (baseline, candidate) if not all(side.metric(name))]
    return f"{missing[0]} does not state it" if missing else None


def _conventions(name: str, baseline: ComparisonSide, candidate: ComparisonSide) -> str | None:
    """Return why figures counted in different conventions are not compared, or None.

    Whether recomputation counts depends on the metric. Only newer runs include it in the
    convention's name, so it is ignored here.
    """
    metrics = [m for side in (baseline, candidate) for m in side.metric(name) if m]
    conventions = {without_recompute(metric.convention) for metric in metrics if metric.convention}
    if len(conventions) < 2:
        return None
    return f"counted in different conventions ({', '.join(sorted(conventions))})"
