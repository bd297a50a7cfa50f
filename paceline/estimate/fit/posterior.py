"""Fit of the coefficients to measured step times: posterior median and covariance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.model.coefficients import (
    CENTRE,
    NAMES,
    WIDTH,
    coefficient_values,
)
from paceline.estimate.model.step import step_time
from paceline.files import catalog

MAX_CASES_AT_ONCE = 8192
"""Number of cases that are predicted together; they fit in a core's cache."""
STEP = 1e-6
"""Step of a coefficient's logarithm for the slope of a residual."""


@dataclass(frozen=True)
class Fit:
    """Fitted coefficients as logarithms, with their covariance."""

    centre: Floats
    covariance: Floats


GEMM_GENERATIONS = tuple(name for name in catalog.generations() if name != "cpu")
SHARED_GEMM_SD = 0.10
"""Common standard deviation of the GEMM efficiencies of all generations. How much of the best
published GEMM rate a training run reaches is the same question for each of them, so it exceeds
the deviation of most generations (docs/dev/estimator-log.md, Robust weights)."""
_SHARED_GEMM_WIDTHS = np.isin(NAMES, [f"gemm_{name}" for name in GEMM_GENERATIONS]) * SHARED_GEMM_SD
PRIOR = Fit(CENTRE, np.diag(WIDTH**2) + np.outer(_SHARED_GEMM_WIDTHS, _SHARED_GEMM_WIDTHS))
"""Prior of the coefficients, before any step time."""
WARM_START_TOLERANCE = 1e-4
"""Relative change of the cost at which a search ends if it starts at a similar fit's result."""
MIN_VARIANCE = 1e-6
"""Minimum variance of a direction in the space of coefficients, relative to the variances of the
coefficients in it."""


def predict(x: Cases, centre: Floats) -> Floats:
    """Return the predicted seconds of a step of each case."""
    return step_time(x, coefficient_values(centre)).total


def predict_each(x: Cases, centres: Floats) -> Floats:
    """Return the seconds of a step for several vectors of coefficients, of shape (vectors, cases).

    Several vectors go through the formulas together: a few thousand numbers take hardly longer than
    a few hundred.
    """
    count = min(len(centres), MAX_CASES_AT_ONCE // max(1, x.size))
    if count <= 1:
        return np.array([predict(x, centre) for centre in centres])
    many, parts = x.pick(np.tile(np.arange(x.size), count)), list[Floats]()
    for first in range(0, len(centres), count):
        batch = centres[np.minimum(np.arange(first, first + count), len(centres) - 1)]
        values = np.exp(np.repeat(batch, x.size, axis=0))
        seconds = step_time(many, dict(zip(NAMES, values.T, strict=True))).total
        parts.append(seconds.reshape(count, x.size))
    return np.concatenate(parts)[: len(centres)]


def posterior(
    prior: Fit,
    x: Cases,
    measured_s: Floats,
    scale: Floats,
    weights: Floats,
    extra_residuals: Callable[[Floats], Floats] | None = None,
    start: Floats | None = None,
) -> Fit:
    """Return the posterior of a prior given step times with a `scale` and a weight each.

    `scale` is a standard deviation of the logarithm. The fit minimises sum(weight x
    soft_l1(log(predicted / measured) / scale)) plus the squared distance from the prior's medians
    in units of its covariance, plus the squares of `extra_residuals`, which returns residuals of
    shape (vectors, observations) for vectors of log coefficients. The covariance of the result is
    Laplace's approximation: the inverse of J^T J with the Jacobian J of all residuals at the
    minimum. soft_l1(e) = 2 (sqrt(1 + e^2) - 1), which is e^2 for small errors and 2 |e| for large
    ones; `soft` is its root with the error's sign.
    """
    weight = np.sqrt(weights)
    whitening = _whitening(prior.covariance)

    def errors(seconds: Floats, logs: Floats) -> Floats:
        """Return residuals of (vectors, cases) and (vectors, coefficients), a row per vector."""
        error = np.log(seconds / measured_s) / scale
        soft = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))
        extra = [extra_residuals(logs)] if extra_residuals else []
        return np.hstack([soft * weight, (logs - prior.centre) @ whitening.T, *extra])

    def residuals(logs: Floats) -> Floats:
        return errors(predict(x, logs)[None], logs[None])[0]

    def slopes(logs: Floats) -> Floats:
        varied_logs = logs + STEP * np.eye(len(logs))
        return ((errors(predict_each(x, varied_logs), varied_logs) - residuals(logs)) / STEP).T

    initial, tolerance = (prior.centre, 1e-8) if start is None else (start, WARM_START_TOLERANCE)
    solution = _least_squares()(
        residuals, initial, slopes, max_nfev=60, ftol=tolerance, xtol=tolerance
    )
    jacobian = np.asarray(solution.jac, dtype=np.float64)
    covariance = np.asarray(np.linalg.inv(jacobian.T @ jacobian), dtype=np.float64)
    return Fit(np.asarray(solution.x, dtype=np.float64), covariance)


def _whitening(covariance: Floats) -> Floats:
    """Return W with W^T W the inverse of a covariance that rounding may have made indefinite."""
    sd = np.sqrt(np.diag(covariance))
    values, vectors = np.linalg.eigh(covariance / np.outer(sd, sd))
    return np.asarray((vectors / np.sqrt(np.maximum(values, MIN_VARIANCE))).T / sd)


def _least_squares() -> Any:
    # scipy has no type stubs, and its import is slow where nothing is fitted.
    return import_module("scipy.optimize").least_squares
