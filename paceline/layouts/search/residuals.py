"""Learn the errors of the time model from the layouts that were measured.

ln(measured / predicted) is a Gaussian process over the layouts. It has five parts: the uncertain
coefficients of the model through their slopes, a factor shared by all layouts, a slope along every
axis, a smooth part in which neighbouring layouts differ little, and noise. All of it has a closed
form (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 2.23-2.30).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from paceline.core.layout import AXIS_FIELDS, Layout
from paceline.estimate.model.case import Floats

SIZE_FIELDS = (*AXIS_FIELDS, "micro_batch")
"""Axes that enter as log2 of their size."""
FEATURE_NAMES = (
    *SIZE_FIELDS,
    "zero >= 1",
    "zero >= 2",
    "zero 3",
    "full",
    "selective",
    "gpipe",
    "zero-bubble",
)


def features(layouts: Sequence[Layout]) -> Floats:
    """Return the features, shape (layouts, FEATURE_NAMES): log2 of sizes, and 0/1 indicators.

    A recompute budget counts as the fraction of full checkpointing that it recomputes.
    """
    rows: list[list[float]] = []
    for layout in layouts:
        kept_share = {"full": 0.0, "budget": layout.recompute_budget or 0.0}
        rows.append(
            [
                *np.log2([getattr(layout, name) for name in SIZE_FIELDS]).tolist(),
                *(layout.zero_stage >= stage for stage in (1, 2, 3)),
                1 - kept_share.get(layout.recompute, 1.0),
                layout.recompute == "selective",
                *(layout.effective_schedule == kind for kind in ("gpipe", "zero-bubble")),
            ]
        )
    return np.array(rows, dtype=float).reshape(len(layouts), len(FEATURE_NAMES))


SHARED_SD = 1.0
"""Prior standard deviation of the factor that all layouts share."""
SLOPE_SD = (0.02, 0.05, 0.12, 0.3)
"""Standard deviations of the error's slope along one axis.

The result is a mixture over all combinations of the three lists, weighted by their likelihood.
"""
SMOOTH_SD = (0.015, 0.04, 0.1)
NOISE_SD = (0.007, 0.015, 0.03, 0.06)
"""Standard deviations of one run's ln step time; the largest is for shared machines."""
PRIOR_MEDIAN_SD = (0.1, 0.04, 0.015)
"""Prior medians of the three standard deviations, log-normal within a factor of 3.

A few runs say little about their variation.
"""
PRIOR_LOG_SD = np.log(3.0)
LENGTH_SCALE = 1.5
"""Feature distance at which the correlation of the smooth part is exp(-1/2)."""


@dataclass(frozen=True)
class LayoutPrior:
    """Knowledge of every layout before any run."""

    features: Floats
    """Shape (layouts, axes)."""
    log_predicted: Floats
    """ln of the predicted seconds, shape (layouts,)."""
    loadings: Floats
    """Jacobian of ln t times the square root of the coefficients' covariance, (layouts, k)."""


@dataclass(frozen=True)
class Posterior:
    """Posterior of ln seconds for every layout."""

    mean: Floats
    sd: Floats
    noise_sd: float


@dataclass(frozen=True)
class _ErrorScales:
    """Standard deviations of the parts of the error."""

    slope: float
    smooth: float
    noise: float


def posterior_after(prior: LayoutPrior, rows: list[int], log_measured: Floats) -> Posterior:
    """Return the posterior of all layouts given runs; `rows` has the layout of each run.

    Mean and variance are those of the mixture over all scales of the error's parts.
    """
    errors = log_measured - prior.log_predicted[rows]
    scales = [_ErrorScales(*scale) for scale in product(SLOPE_SD, SMOOTH_SD, NOISE_SD)]
    among, alone = _parts(prior, rows, rows), _variances(prior)
    across = _parts(prior, list(range(len(prior.log_predicted))), rows)
    likelihoods = np.array([_log_posterior(among, scale, errors) for scale in scales])
    weights = np.exp(likelihoods - likelihoods.max())
    weights /= weights.sum()
    moments = [_moments(among, across, alone, scale, errors) for scale in scales]
    shift = np.einsum("s,sl->l", weights, np.array([mean for mean, _ in moments]))
    square = np.einsum("s,sl->l", weights, np.array([v + mean**2 for mean, v in moments]))
    variance = np.maximum(square - shift**2, 1e-12)
    noise = float(weights @ np.array([scale.noise for scale in scales]))
    return Posterior(prior.log_predicted + shift, np.sqrt(variance), noise)


def _moments(
    among: CovarianceParts,
    across: CovarianceParts,
    alone: CovarianceParts,
    scale: _ErrorScales,
    errors: Floats,
) -> tuple[Floats, Floats]:
    """Return mean and variance of every layout's error for one set of scales."""
    variance = _total_covariance(alone, scale)
    if not len(errors):
        return np.zeros_like(variance), variance
    factor = _factor(among, scale)
    half = np.linalg.solve(factor, _total_covariance(across, scale).T)
    mean = half.T @ np.linalg.solve(factor, errors)
    return mean, np.maximum(variance - (half**2).sum(axis=0), 0.0)


CovarianceParts = tuple[Floats, Floats, Floats]
"""Covariances of coefficients and shared factor, of slopes along axes, and of the smooth part."""


def _parts(prior: LayoutPrior, some: list[int], others: list[int]) -> CovarianceParts:
    centred_features = prior.features - prior.features.mean(axis=0)
    a, b = centred_features[some], centred_features[others]
    distance = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2)
    shared = prior.loadings[some] @ prior.loadings[others].T + SHARED_SD**2
    return shared, a @ b.T, np.exp(-distance / (2 * LENGTH_SCALE**2))


def _variances(prior: LayoutPrior) -> CovarianceParts:
    """Return the variances of the parts for all layouts."""
    centred_features = prior.features - prior.features.mean(axis=0)
    shared = (prior.loadings**2).sum(axis=1) + SHARED_SD**2
    return shared, (centred_features**2).sum(axis=1), np.ones(len(centred_features))


def _total_covariance(parts: CovarianceParts, scale: _ErrorScales) -> Floats:
    shared, slopes, smooth = parts
    return shared + scale.slope**2 * slopes + scale.smooth**2 * smooth


def _factor(among: CovarianceParts, scale: _ErrorScales) -> Floats:
    """Return L with L L' = K, the covariance of the runs including noise."""
    covariance = _total_covariance(among, scale)
    noisy = covariance + scale.noise**2 * np.eye(len(covariance))
    return np.asarray(np.linalg.cholesky(noisy), dtype=np.float64)


def _log_posterior(among: CovarianceParts, scale: _ErrorScales, errors: Floats) -> float:
    """Return ln prior - e' K^-1 e / 2 - ln |K| / 2 for errors e, up to a constant."""
    log_ratio = np.log([scale.slope, scale.smooth, scale.noise]) - np.log(PRIOR_MEDIAN_SD)
    log_density = -0.5 * float((log_ratio**2).sum()) / float(PRIOR_LOG_SD) ** 2
    if len(errors):
        factor = _factor(among, scale)
        half = np.linalg.solve(factor, errors)
        log_density += float(-0.5 * half @ half - np.log(np.diag(factor)).sum())
    return log_density
