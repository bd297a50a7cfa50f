"""Fit of the time model's coefficients to published step times, and of the model's error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from paceline.estimate.fit.interval import Z80
from paceline.estimate.fit.posterior import PRIOR, Fit, posterior
from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.model.coefficients import NAMES

EXPERT_COEFFICIENTS = (
    "gemm_grouped", "grouped_tokens", "grouped_narrow", "imbalance", "experts_pace", "permuted",
    "experts_fused", "host_experts_s", "host_capacity", "ep_exposed", "ep_overlapped",
    "all_to_all", "ep_proxied", "ep_proxied_start_s",
)  # fmt: skip
"""Coefficients used only by models with experts."""
SCALE, EXPERTS_SCALE = 0.08, 0.15
"""Expected error of a good model on published step times, as a standard deviation of the logarithm:
dense models, and models with experts, whose kernels and dispatchers are rarely stated
(docs/dev/estimator-log.md, Robust weights)."""
EVIDENCE_PER_SOURCE = 3.0
"""Number of independent rows that a source with more rows counts for, because rows of one table
share its conditions. Each of k sources of one software counts for 1 / sqrt(k) of that, because
releases of one software have much in common. Unseen sources, years and software are predicted
better with 3 than with 6 or 12 (docs/dev/estimator-log.md, Rows per source)."""
SHARED_SD = 0.1
"""Share of the remaining deviation by which rows with experts may move common coefficients. It is
small because their routing and balance are not stated."""
STACK_SOURCES = 4
"""Weight, in sources, of all implementations together relative to the sources of one: few sources
determine its deviation poorly."""


def fit(
    x: Cases,
    measured_s: Floats,
    sources: Sequence[str],
    stacks: Sequence[str],
    start: Floats | None = None,
) -> Fit:
    """Return the posterior given measured step times.

    It minimises sum(soft_l1(log(predicted / measured) / 0.08)) over rows, each with its
    `source_weights`, plus the squared distance from the priors. soft_l1 limits the influence of a
    few rows with errors in the source itself. The covariance is Laplace's approximation, from the
    Jacobian. `start` is the start of the search; None means the prior's medians.
    """
    scale = np.full(x.size, SCALE)
    return posterior(PRIOR, x, measured_s, scale, source_weights(sources, stacks), None, start)


def fit_with_experts(
    x: Cases,
    measured_s: Floats,
    sources: Sequence[str],
    stacks: Sequence[str],
    start: Floats | None = None,
) -> Fit:
    """Fit dense rows first, then the coefficients of experts to the rows with experts."""
    experts = x.experts > 1
    names, software = np.array(sources), np.array(stacks)
    dense_rows = (names[~experts].tolist(), software[~experts].tolist())
    dense = fit(x.pick(~experts), measured_s[~experts], *dense_rows, start)
    if not experts.any():
        return dense
    is_expert = np.array([name in EXPERT_COEFFICIENTS for name in NAMES])
    keep = np.where(is_expert, 1.0, SHARED_SD)
    prior = Fit(dense.centre, dense.covariance * np.outer(keep, keep))
    weights = source_weights(names[experts].tolist(), software[experts].tolist())
    scale = np.full(int(experts.sum()), EXPERTS_SCALE)
    expert_start = None if start is None else np.where(is_expert, start, dense.centre)
    after = posterior(
        prior, x.pick(experts), measured_s[experts], scale, weights, None, expert_start
    )
    covariance = np.where(np.outer(is_expert, is_expert), after.covariance, 0.0)
    shared = np.outer(~is_expert, ~is_expert)
    return Fit(
        np.where(is_expert, after.centre, dense.centre),
        np.where(shared, dense.covariance, covariance),
    )


def equal_weights(sources: Sequence[str]) -> Floats:
    """Return one weight per row so that the rows of every source add up to 1."""
    num_rows = Counter(sources)
    return np.array([1 / num_rows[source] for source in sources])


def source_weights(sources: Sequence[str], stacks: Sequence[str]) -> Floats:
    """Return the number of independent rows that each row counts for.

    It is min(3 / rows of its source, 1) / sqrt(sources of its software).
    """
    num_rows = Counter(sources)
    per_row = np.array([min(EVIDENCE_PER_SOURCE / num_rows[source], 1.0) for source in sources])
    of_stack = dict[str, set[str]]()
    for source, stack in zip(sources, stacks, strict=True):
        of_stack.setdefault(stack, set()).add(source)
    alike = np.array([len(of_stack[stack]) for stack in stacks])
    return per_row / np.sqrt(alike)


def between_sd(
    log_errors: Floats, groups: Sequence[str], known_variance: Floats, min_rows: int = 5
) -> float:
    """Return the standard deviation between groups, beyond the uncertainty of the fits.

    It is the root of the mean of the groups' squared mean errors. `log_errors` are logarithms of
    predicted over measured by fits without a row's own group. Two terms are subtracted:
    `known_variance`, which an interval already has from the coefficients' covariance, and the
    sampling variance of a group's mean, its variance over its rows. Groups with fewer than
    `min_rows` rows do not count. The result is 0 if nothing is left.
    """
    names, squares = np.array(groups), list[float]()
    for name in np.unique(names):
        rows = log_errors[names == name]
        if len(rows) >= min_rows:
            expected_square = rows.var() / len(rows) + known_variance[names == name].mean()
            squares.append(float(rows.mean() ** 2 - expected_square))
    return float(np.sqrt(max(0.0, np.mean(squares)))) if squares else 0.0


def model_error(
    x: Cases, log_errors: Floats, known_variance: Floats, sources: Sequence[str]
) -> tuple[float, dict[str, float]]:
    """Return the deviation between sources, and `residual_sd` beyond it.

    Arguments are those of `residual_sd`.
    """
    source_sd = between_sd(log_errors, sources, known_variance)
    return source_sd, residual_sd(x, log_errors, known_variance + source_sd**2, sources)


def residual_sd(
    x: Cases, log_errors: Floats, known_variance: Floats, sources: Sequence[str]
) -> dict[str, float]:
    """Return the model error by implementation, beyond the uncertainty of the fits.

    It is chosen so that, with `known_variance`, which an interval already has from the
    coefficients' covariance, four in five rows are within 1.28 deviations. `log_errors` are
    logarithms of predicted over measured by fits without a row's own source. An implementation with
    n sources counts with weight n, all rows together with STACK_SOURCES; an implementation without
    rows gets only the latter. Rows with experts, which have their own deviation, do not count if
    there are others.
    """
    dense, names = x.experts <= 1, np.array(sources)
    if dense.any():
        x, names = x.pick(dense), names[dense]
        log_errors, known_variance = log_errors[dense], known_variance[dense]
    pooled, variances = _residual_variance(log_errors, known_variance), dict[str, float]()
    for stack in ("softmax", "fused", "torch"):
        rows = x.is_category("implementation", stack)
        count = len(np.unique(names[rows]))
        variance = _residual_variance(log_errors[rows], known_variance[rows]) if count else 0.0
        variances[stack] = (count * variance + STACK_SOURCES * pooled) / (count + STACK_SOURCES)
    return {stack: float(np.sqrt(variance)) for stack, variance in variances.items()}


def _residual_variance(log_errors: Floats, known_variance: Floats) -> float:
    """Return the variance to add to `known_variance` so that 80% of rows are within 1.28 sd."""
    return max(0.0, float(np.quantile((log_errors / Z80) ** 2 - known_variance, 0.8)))
