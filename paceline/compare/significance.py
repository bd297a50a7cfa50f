"""Significance tests of two sets of repeats: slower, faster, same within a margin, undecided.

All tests use natural logarithms, so that a ratio and its inverse are treated alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import exp, log1p
from typing import Any, Literal

import numpy as np

from paceline.core.steps import FloatColumn
from paceline.core.units import pluralize
from paceline.core.value import NonNegativeInt, Value

MIN_OCCASIONS = 5
"""Minimum number of occasions (days) for an estimate of the variation between them."""


@dataclass(frozen=True)
class VariationPrior:
    """Run-to-run variation that is known in advance, as relative standard deviations."""

    within: float
    """Between runs of one occasion."""
    degrees: float
    between: float
    """Between occasions: days, or hosts."""
    between_degrees: float


class RunVariation(Value):
    """Relative standard deviations of the step time of one configuration on one machine."""

    within: float
    """Standard deviation between runs of one occasion (a day)."""
    between: float
    """Standard deviation between occasions, beyond that of their runs; the total if no occasion has
    two runs."""
    degrees: float
    """Degrees of freedom of the larger part."""
    n_runs: NonNegativeInt
    n_occasions: NonNegativeInt

    @property
    def single(self) -> float:
        """Standard deviation of one run on any occasion."""
        return (self.within**2 + self.between**2) ** 0.5

    @property
    def prior(self) -> VariationPrior:
        """The variation as a prior; without two runs of a day, both parts are the total."""
        return VariationPrior(self.within or self.single, self.degrees, self.between, self.degrees)

    @property
    def words(self) -> str:
        """The variation and its source, for people."""
        return (
            f"{100 * self.single:.2g}% from run to run, by {pluralize(self.n_runs, 'run')} of "
            f"{pluralize(self.n_occasions, 'day')} in this machine's history"
        )


def estimate_run_variation(
    occasions: Sequence[Sequence[float]], levels: Sequence[float], num_levels: int = 1
) -> RunVariation | None:
    """Estimate the variation of runs around the level of their occasion.

    Returns None with fewer than five occasions. One-way analysis of variance of r = log(value /
    level): within^2 = sum (r - mean_k)^2 / (N - K), between^2 = (sum n_k mean_k^2 / (K - levels) -
    within^2) / n0, n0 = (N - sum n_k^2 / N) / (K - 1), not below 0. Outliers are not clipped, so a
    machine that disturbs its runs gets a wide estimate.
    """
    residuals = [
        np.log(values) - np.log(level) for values, level in zip(occasions, levels, strict=True)
    ]
    n, k = sum(map(len, residuals)), len(residuals)
    if k - num_levels < MIN_OCCASIONS - 1:
        return None
    sizes = np.array([len(residual) for residual in residuals])
    means = np.array([float(residual.mean()) for residual in residuals])
    within = sum(float(((residual - residual.mean()) ** 2).sum()) for residual in residuals) / max(
        1, n - k
    )
    typical = (n - float((sizes**2).sum()) / n) / (k - 1)
    above = float((sizes * means**2).sum()) / (k - num_levels)
    return RunVariation(
        within=within**0.5,
        between=max(0.0, (above - within) / typical) ** 0.5,
        degrees=float(k - num_levels),
        n_runs=n,
        n_occasions=k,
    )


MIN_REPEATS = 3
"""Minimum repeats per side for an estimate of the run-to-run variation."""

MARGIN = 0.01
"""Default margin: a smaller relative difference does not matter."""

CONFIDENCE = 0.95
CONFIDENCE_OF_FEW = 0.99
"""Confidence that a difference needs where a prior replaces repeats; CONFIDENCE makes it likely."""
PLANNED_POWER = 0.8
"""Probability of a decision for which the number of further repeats is planned."""

MAX_FURTHER_REPEATS = 50
QUANTILES: FloatColumn = (np.arange(16) + 0.5) / 16
"""Quantiles at which the possible variation of the repeats of each side is sampled."""

NO_SPREAD = 1e-12
"""Standard error of the log below which values are identical up to rounding."""

Change = Literal["higher", "lower", "likely higher", "likely lower", "same", "undecided"]


@dataclass(frozen=True)
class RatioEstimate:
    """Log of a ratio, its standard error, and the degrees of freedom of that error."""

    log_ratio: float
    standard_error: float
    degrees: float
    variances: tuple[float, ...] = ()
    """Variance of a single repeat of each side with repeats; the mean of n repeats has 1/n of
    it."""
    floor: RatioEstimate | None = None
    """The same estimate without the variation between occasions, which is never less sure."""

    @property
    def ratio(self) -> float:
        """The point estimate."""
        return bounded_exp(self.log_ratio)

    @property
    def identical(self) -> bool:
        """True when no side has any variation, so that no test is possible."""
        return self.standard_error < NO_SPREAD

    def log_interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Return the two-sided interval of the log ratio by Student's t."""
        reach = self._reach(confidence)
        return self.log_ratio - reach, self.log_ratio + reach

    def _reach(self, confidence: float) -> float:
        reach = student_t(0.5 + confidence / 2, self.degrees) * self.standard_error
        return max(reach, self.floor._reach(confidence)) if self.floor else reach

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Return the two-sided interval of the ratio."""
        low, high = self.log_interval(confidence)
        return bounded_exp(low), bounded_exp(high)

    def p_value(self, tolerance: float = 0.0) -> float:
        """Return the two-sided p-value of "the ratio is 1", or is within 1 + tolerance of 1."""
        beyond = max(0.0, abs(self.log_ratio) - log1p(tolerance))
        if self.identical:
            return 1.0 if beyond < NO_SPREAD else 0.0
        p = min(1.0, 2.0 * student_t_tail(beyond / self.standard_error, self.degrees))
        return max(p, self.floor.p_value(tolerance)) if self.floor else p


def compare_repeats(baseline: Sequence[float], candidate: Sequence[float]) -> RatioEstimate:
    """Estimate candidate over baseline by Welch's unequal-variances t on log values, one per run.

    d = mean(log c) - mean(log b), se^2 = s_b^2/n_b + s_c^2/n_c, degrees of freedom by Welch and
    Satterthwaite. Values must be positive, with at least two on either side. Source: Welch, "The
    generalization of Student's problem when several different population variances are involved",
    Biometrika 34 (1947).
    """
    logs = [np.log(np.asarray(values, dtype=np.float64)) for values in (baseline, candidate)]
    sizes = [len(values) for values in logs]
    variances = [float(values.var(ddof=1)) for values in logs]
    parts = [variance / size for variance, size in zip(variances, sizes, strict=True)]
    error = sum(parts) ** 0.5
    weights = [part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True)]
    degrees = sum(parts) ** 2 / sum(weights) if error >= NO_SPREAD else float(sum(sizes) - 2)
    return RatioEstimate(float(logs[1].mean() - logs[0].mean()), error, degrees, tuple(variances))


def compare_with_figure(figure: float, candidate: Sequence[float]) -> RatioEstimate:
    """Estimate candidate over a fixed figure by the one-sample t on log values (n - 1 degrees)."""
    logs = np.log(np.asarray(candidate, dtype=np.float64))
    variance = float(logs.var(ddof=1))
    error = (variance / len(logs)) ** 0.5
    return RatioEstimate(float(logs.mean() - np.log(figure)), error, len(logs) - 1.0, (variance,))


def compare_with_prior(
    baseline: Sequence[float], candidate: Sequence[float], prior: VariationPrior, published: bool
) -> RatioEstimate:
    """Estimate candidate over baseline by the moderated t, also of single runs.

    s^2 = (nu_0 s_0^2 + sum of squares within the sides) / (nu_0 + nu), nu = number of runs - number
    of sides, degrees nu_0 + nu; se^2 = s^2 (1/n_b + 1/n_c). A `published` baseline is a figure
    without error. Source: Smyth, Stat. Appl. Genet. Mol. Biol. 3 (2004), article 3.
    """
    logs = [np.log(np.asarray(values, dtype=np.float64)) for values in (baseline, candidate)]
    sides = logs[1:] if published else logs
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in sides)
    degrees = prior.degrees + sum(len(values) - 1 for values in sides)
    variance = (prior.degrees * prior.within**2 + squares) / degrees
    error = (variance * sum(1 / len(values) for values in sides)) ** 0.5
    log_ratio = float(logs[1].mean() - logs[0].mean())
    return RatioEstimate(log_ratio, error, degrees, len(sides) * (variance,))


LASTING_SHARE = 0.5
"""Share of the variance between runs of one occasion that may last from run to run. In published
sets it is about 0.1 (autocorrelation of consecutive runs)."""


def with_occasions(
    estimate: RatioEstimate, confounding: float, prior: VariationPrior, blocks: float = 0.0
) -> RatioEstimate:
    """Return `estimate` with the variation between the occasions of the two sides.

    `confounding` is the sum over occasions of the squared difference between the sides' shares of
    runs: 2 where each side has an occasion of its own. confounding x between^2 is added to the
    squared error, with the degrees of freedom of Satterthwaite. `blocks` is the sum over the sides
    of 1 - 1/n where the runs of one occasion form blocks (AAA BBB): half of within^2 then does not
    average out. Blocks of n runs are thus never less sure than single runs of the same variation.
    """
    parts = (
        (estimate.standard_error**2, estimate.degrees),
        (confounding * prior.between**2, prior.between_degrees),
        (blocks * LASTING_SHARE * prior.within**2, estimate.degrees),
    )
    if not any(variance for variance, _ in parts[1:]):
        return estimate
    total = sum(variance for variance, _ in parts)
    degrees = total**2 / sum(variance**2 / degrees for variance, degrees in parts)
    return replace(estimate, standard_error=total**0.5, degrees=degrees, floor=estimate)


def decide(
    estimate: RatioEstimate,
    margin: float,
    resolution: float = 0.0,
    confidence: float = CONFIDENCE,
) -> Change:
    """Compare an estimate with the margin; `resolution` is the largest relative rounding error.

    Higher or lower: the interval of this confidence excludes every ratio that rounding alone could
    give, and the estimate lies beyond margin and resolution together. Same: the 90% interval lies
    entirely within them (two one-sided tests at 5%, Schuirmann 1987). Otherwise undecided.
    """
    rounding, limit = log1p(resolution), log1p(margin) + log1p(resolution)
    low, high = estimate.log_interval(confidence)
    if estimate.log_ratio > limit and low > rounding:
        return "higher"
    if estimate.log_ratio < -limit and high < -rounding:
        return "lower"
    low, high = estimate.log_interval(0.90)
    return "same" if -limit < low and high < limit else "undecided"


def decide_few(
    estimate: RatioEstimate, margin: float, resolution: float = 0.0, *, may_be_same: bool
) -> Change:
    """Return `decide` for an estimate whose error comes from a prior.

    Higher or lower needs the 99% interval; the 95% interval makes it likely.
    """
    sure = decide(estimate, margin, resolution, CONFIDENCE_OF_FEW)
    if sure in ("higher", "lower"):
        return sure
    match decide(estimate, margin, resolution):
        case "higher":
            return "likely higher"
        case "lower":
            return "likely lower"
        case "same" if may_be_same:
            return "same"
        case _:
            return "undecided"


def decide_by_margin(
    log_ratio: float, known_error: float, margin: float, resolution: float = 0.0
) -> Change:
    """Compare figures that are counted, not timed, or all identical, with the margin alone.

    `known_error` is the known part of the standard error of the log ratio. A difference must exceed
    1.96 times this error. Within the margin, a true difference of two margins must have had an 84%
    chance to show outside; it has as long as 0.98 of these errors fit into the margin.
    """
    limit, reach = log1p(margin) + log1p(resolution), 1.96 * known_error
    if abs(log_ratio) > limit:
        if abs(log_ratio) - log1p(resolution) <= reach:
            return "undecided"
        return "higher" if log_ratio > 0 else "lower"
    return "same" if reach <= 2 * limit else "undecided"


def further_repeats(
    estimate: RatioEstimate, n_fewest: int, n_most: int, margin: float, resolution: float = 0.0
) -> int | None:
    """Return the repeats still needed per side, or None for more than MAX_FURTHER_REPEATS.

    This is the smallest number at which a true ratio equal to the observed one, with the observed
    variation, would be decided with 80% probability. It is a plan, not a guarantee: the variation
    of three repeats is itself uncertain by a factor of two.
    """
    for more in range(1, MAX_FURTHER_REPEATS + 1):
        n = n_fewest + more
        if n > n_most and chance_of_decision(estimate, n, margin, resolution) >= PLANNED_POWER:
            return more
    return None


def chance_of_decision(
    estimate: RatioEstimate, n: int, margin: float, resolution: float = 0.0
) -> float:
    """Return the probability that n repeats per side decide, if the estimate is the truth."""
    rounding, limit = log1p(resolution), log1p(margin) + log1p(resolution)
    plan, distance = _Plan.of(estimate.variances, n), abs(estimate.log_ratio)
    if plan.error < NO_SPREAD:
        return 1.0
    beyond = np.maximum(limit, rounding + plan.reach(0.975))
    inside = np.maximum(0.0, limit - plan.reach(0.95))
    differs = plan.chance_above(beyond - distance)
    return differs + plan.chance_above(-inside - distance) - plan.chance_above(inside - distance)


def power(
    variances: Sequence[float], n: int, change: float, margin: float, resolution: float = 0.0
) -> float:
    """Return the probability that `decide` finds a true relative `change` with n repeats per side.

    `variances` are the true variances of single repeats, one for each side that has repeats: a
    single one for a comparison with a fixed figure. `resolution` is the same as for `decide`.
    """
    plan = _Plan.of(variances, n)
    if plan.error < NO_SPREAD:
        return 1.0
    rounding, limit = log1p(resolution), log1p(margin) + log1p(resolution)
    beyond = np.maximum(limit, rounding + plan.reach(0.975))
    return plan.chance_above(beyond - log1p(change))


@dataclass(frozen=True)
class _Plan:
    """The test that n repeats per side will make: a mean, and an error that they estimate."""

    error: float
    """True standard error of the log ratio."""
    degrees: FloatColumn
    sampled_errors: FloatColumn
    """Degrees of freedom and standard errors that the repeats may show, all pairs equally
    likely."""

    @staticmethod
    def of(variances: Sequence[float], n: int) -> _Plan:
        """Return the plan; a side's sample variance is its variance times chi^2 / (n - 1).

        The degrees of freedom follow Welch and Satterthwaite.
        """
        error = (sum(variances) / n) ** 0.5
        if error < NO_SPREAD:
            return _Plan(error, np.ones(1), np.zeros(1))
        shares: FloatColumn = _special().chdtri(n - 1.0, QUANTILES) / (n - 1)
        sampled_variances = np.meshgrid(*(variance * shares for variance in variances))
        total = np.sum(sampled_variances, axis=0).ravel()
        degrees = (n - 1) * total**2 / np.sum(np.square(sampled_variances), axis=0).ravel()
        return _Plan(error, degrees, np.sqrt(total / n))

    def reach(self, quantile: float) -> FloatColumn:
        """Return half the width of Student's t interval for each possible error."""
        return _special().stdtrit(self.degrees, quantile) * self.sampled_errors

    def chance_above(self, distance: FloatColumn) -> float:
        """Return the probability that the mean is off by more than the `distance` of each error."""
        return float(np.mean(_special().ndtr(-distance / self.error)))


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (false discovery rate).

    Sorted in ascending order, each becomes the minimum over itself and the following of m p_k / k,
    at most 1. Source: Benjamini and Hochberg, J. R. Statist. Soc. B 57 (1995).
    """
    values: FloatColumn = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values)
    scaled = values[order] * len(values) / np.arange(1, len(values) + 1)
    result = np.empty_like(values)
    result[order] = np.minimum(1.0, np.minimum.accumulate(scaled[::-1])[::-1])
    return [float(value) for value in result]


def student_t(quantile: float, degrees: float) -> float:
    """Return a quantile of Student's t."""
    return float(_special().stdtrit(degrees, quantile))


def student_t_tail(value: float, degrees: float) -> float:
    """Return the probability that Student's t exceeds `value`."""
    return float(_special().stdtr(degrees, -value))


def normal_cdf(value: float) -> float:
    """Return the probability that a standard normal variable is below `value`."""
    return float(_special().ndtr(value))


def _special() -> Any:
    # Imported here because only comparisons need it, and by name because it has no type
    # declarations.
    return import_module("scipy.special")


def bounded_exp(value: float) -> float:
    """Return exp(value), kept finite and above zero."""
    return exp(min(max(value, -700.0), 700.0))


DRAWS = 20_000
"""Number of Monte Carlo draws. A probability of 0.5 is known to 0.004, one of 0.95 to 0.002."""
PRIOR_DEGREES = 2
"""Runs' worth of the pooled variance in the variance of each option. With 2, options whose standard
deviations differ tenfold (0.5 to 5%) are called the best about as often as they are."""
POOLED_PRIOR = 0.01, 2
"""Run-to-run variation and degrees of freedom that the pooled variance is shrunk to, between those
of the classes in run_variation.yaml. They matter where only one or two options ran twice."""
MIN_SPREAD_SHARE = 0.1
"""Minimum variance of the options' true times, relative to the error of one mean."""
MIN_CHANCE = 0.05
"""Options with at least this probability of being faster than the best count as tied with it."""


@dataclass(frozen=True)
class RankedOption:
    """One option in the ranking of all options."""

    chance: float
    """Probability that it is the fastest of all, 0 to 1."""
    faster_than_best: float
    """Probability that it is faster than the option with the fastest measured runs."""


def rank_options(seconds: Sequence[Sequence[float]], best: int) -> tuple[RankedOption, ...] | None:
    """Rank options by the times of their runs, or return None when no option ran twice.

    Each option has its own variation. Its variance is distributed as the sum of its squares plus 2
    times the pooled variance, over chi^2 with as many degrees of freedom plus 2 (an empirical prior
    as in Smyth, Stat. Appl. Genet. Mol. Biol. 3 (2004)). The pooled variance is uncertain itself:
    all squares plus two of 1%, over chi^2 with as many degrees. The true log times of the options
    are normal around their mean, with the spread that the means show beyond the variation
    (moments), so the mean of an option's n runs is shrunk towards all options. The probabilities
    are frequencies over 20,000 seeded draws.

    Variation that the runs did not sample (between days, nodes or allocations) is not included.
    Source: Gelman et al., Bayesian Data Analysis (2013), ch. 5.
    """
    logs = [np.log(np.asarray(runs, dtype=np.float64)) for runs in seconds]
    counts = np.array([len(runs) for runs in logs])
    degrees = int((counts - 1).sum())
    if degrees < 1:
        return None
    squares = np.array([float(((runs - runs.mean()) ** 2).sum()) for runs in logs])
    prior, prior_degrees = POOLED_PRIOR
    total = float(squares.sum()) + prior_degrees * prior**2
    pooled = total / (degrees + prior_degrees)
    rng = np.random.default_rng(0)
    means = np.array([runs.mean() for runs in logs])
    freedom = counts - 1 + PRIOR_DEGREES
    errors = (squares + PRIOR_DEGREES * pooled) / freedom / counts  # (options,)
    centre = float(np.average(means, weights=1 / errors))
    spread = max(float(np.var(means, ddof=1) - errors.mean()) if len(means) > 1 else 0.0, 0.0)
    spread = max(spread, MIN_SPREAD_SHARE * float(errors.mean()))
    # Draws of all options: (options, draws).
    pooled_draws = total / rng.chisquare(degrees + prior_degrees, DRAWS)
    error_draws = squares[:, None] + PRIOR_DEGREES * pooled_draws
    error_draws /= rng.chisquare(freedom[:, None], (len(logs), DRAWS))
    error_draws = error_draws / counts[:, None]
    weights = spread / (spread + error_draws)
    times = centre + weights * (means - centre)[:, None]
    times += rng.standard_normal(times.shape) * np.sqrt(weights * error_draws)
    winner = times.argmin(axis=0)
    return tuple(
        RankedOption(float(np.mean(winner == at)), float(np.mean(times[at] < times[best])))
        for at in range(len(logs))
    )
