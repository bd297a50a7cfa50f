"""What the time model gets wrong here, by layout: learned from the layouts that were measured.

ln(measured / predicted) is taken as a Gaussian process over the layouts: the model's own uncertain
coefficients through their slopes, a factor that all layouts share, a slope along every axis of the
layout, a smooth rest in which neighbouring layouts differ little, and noise. Everything has a
closed form (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 2.23
to 2.30).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from paceline.core.layout import AXIS_FIELDS, Layout
from paceline.estimate.model.case import Floats

SIZES = (*AXIS_FIELDS, "micro_batch")
"""Axes that count by their doublings."""
NAMES = (*SIZES, "zero >= 1", "zero >= 2", "zero 3", "full", "selective", "gpipe", "zero-bubble")


def features(layouts: Sequence[Layout]) -> Floats:
    """(layouts, NAMES): doublings of the sizes, and 1 or 0 for what is there or is not.

    Recomputation by a budget counts as the part of a full one that the budget does not keep.
    """
    rows = [[*_doublings(layout), *_present(layout)] for layout in layouts]
    return np.array(rows, dtype=float).reshape(len(layouts), len(NAMES))


def _doublings(layout: Layout) -> list[float]:
    return [float(np.log2(getattr(layout, name))) for name in SIZES]


def _present(layout: Layout) -> list[float]:
    return [
        *(layout.zero_stage >= stage for stage in (1, 2, 3)),
        _recomputed(layout),
        layout.recompute == "selective",
        *(layout.effective_schedule == kind for kind in ("gpipe", "zero-bubble")),
    ]


def _recomputed(layout: Layout) -> float:
    kept = {"full": 0.0, "budget": layout.recompute_budget or 0.0}
    return 1 - kept.get(layout.recompute, 1.0)


SHARED_SD = 1.0
"""Of the factor by which all layouts are missed together, before any was measured."""
SLOPE_SD = (0.02, 0.05, 0.12, 0.3)
"""Of the error's slope along one axis. All combinations of these three deviations count, each by
its likelihood."""
REST_SD = (0.015, 0.04, 0.1)
NOISE_SD = (0.007, 0.015, 0.03, 0.06)
"""Of one run's step time; the largest on machines that others use."""
USUAL = (0.1, 0.04, 0.015)
"""Where the three are sought, within a factor 3: few runs say little of how they scatter."""
WIDTH = np.log(3.0)
LENGTH = 1.5
"""Distance in the space of features at which the smooth rest is related by exp(-1/2)."""


@dataclass(frozen=True)
class LayoutPrior:
    """What is known of every layout before a run."""

    features: Floats
    """(layouts, axes)."""
    log_predicted: Floats
    """ln of the predicted seconds."""
    loadings: Floats
    """(layouts, k): the prediction's slopes times a square root of the coefficients' covariance."""


@dataclass(frozen=True)
class Posterior:
    """What is believed of every layout after some runs, as ln of its seconds."""

    mean: Floats
    sd: Floats
    noise_sd: float


@dataclass(frozen=True)
class _Scale:
    """Deviations of the error's parts."""

    slope: float
    rest: float
    noise: float


def believe(prior: LayoutPrior, rows: list[int], log_measured: Floats) -> Posterior:
    """The belief about all layouts given runs of some: `rows` says of which, repeats included.

    Mean and variance are those of the mixture over all scales of the error's parts.
    """
    errors = log_measured - prior.log_predicted[rows]
    scales = [_Scale(*scale) for scale in product(SLOPE_SD, REST_SD, NOISE_SD)]
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
    among: Parts, across: Parts, alone: Parts, scale: _Scale, errors: Floats
) -> tuple[Floats, Floats]:
    """Mean and variance of every layout's error on one scale."""
    variance = _joined(alone, scale)
    if not len(errors):
        return np.zeros_like(variance), variance
    factor = _factor(among, scale)
    half = np.linalg.solve(factor, _joined(across, scale).T)
    mean = half.T @ np.linalg.solve(factor, errors)
    return mean, np.maximum(variance - (half**2).sum(axis=0), 0.0)


Parts = tuple[Floats, Floats, Floats]
"""Covariances by coefficients and shared factor, by slopes along axes, and of the smooth rest."""


def _parts(prior: LayoutPrior, some: list[int], others: list[int]) -> Parts:
    centred = prior.features - prior.features.mean(axis=0)
    a, b = centred[some], centred[others]
    distance = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2)
    shared = prior.loadings[some] @ prior.loadings[others].T + SHARED_SD**2
    return shared, a @ b.T, np.exp(-distance / (2 * LENGTH**2))


def _variances(prior: LayoutPrior) -> Parts:
    """The diagonals of the parts among all layouts."""
    centred = prior.features - prior.features.mean(axis=0)
    shared = (prior.loadings**2).sum(axis=1) + SHARED_SD**2
    return shared, (centred**2).sum(axis=1), np.ones(len(centred))


def _joined(parts: Parts, scale: _Scale) -> Floats:
    shared, slopes, rest = parts
    return shared + scale.slope**2 * slopes + scale.rest**2 * rest


def _factor(among: Parts, scale: _Scale) -> Floats:
    """L with L L' = K, the covariance of the runs with their noise."""
    covariance = _joined(among, scale)
    noisy = covariance + scale.noise**2 * np.eye(len(covariance))
    return np.asarray(np.linalg.cholesky(noisy), dtype=np.float64)


def _log_posterior(among: Parts, scale: _Scale, errors: Floats) -> float:
    """Of a scale after errors e of runs: ln prior - e' K^-1 e / 2 - ln |K| / 2, and a constant."""
    far = np.log([scale.slope, scale.rest, scale.noise]) - np.log(USUAL)
    log_density = -0.5 * float((far**2).sum()) / float(WIDTH) ** 2
    if len(errors):
        factor = _factor(among, scale)
        half = np.linalg.solve(factor, errors)
        log_density += float(-0.5 * half @ half - np.log(np.diag(factor)).sum())
    return log_density
