"""Moving the priors by measured step times: a posterior median and covariance of the coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from paceline.estimate.case import Cases, Floats
from paceline.estimate.coefficients import CENTRE, WIDTH, named
from paceline.estimate.step import step_time

SCALE = 0.12
"""What a good model still misses of a published step time, as a deviation of the logarithm."""
EVIDENCE_PER_SOURCE = 6.0
"""How many independent rows a source counts for: rows of one table share its conditions."""


@dataclass(frozen=True)
class Fit:
    """Coefficients after looking at step times, as logarithms."""

    centre: Floats
    covariance: Floats


def predict(x: Cases, centre: Floats) -> Floats:
    """Seconds of a step."""
    return step_time(x, named(centre)).total


def fit(x: Cases, measured_s: Floats, sources: Sequence[str]) -> Fit:
    """The posterior given measured step times, every source with the same weight.

    Minimises sum(soft_l1(log(predicted / measured) / 0.12)) over rows, each weighted with
    6 / (rows of its source), plus the squared distance from the priors. soft_l1 keeps a few rows
    that the source itself got wrong from pulling. The covariance is Laplace's, from the Jacobian.
    """
    weight = np.sqrt(EVIDENCE_PER_SOURCE * equal_weights(sources))

    def residuals(logs: Floats) -> Floats:
        error = np.log(predict(x, logs) / measured_s) / SCALE
        soft = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))
        return np.concatenate([soft * weight, (logs - CENTRE) / WIDTH])

    found = _least_squares()(residuals, CENTRE, max_nfev=60)
    slope = np.asarray(found.jac, dtype=np.float64)
    covariance = np.asarray(np.linalg.inv(slope.T @ slope), dtype=np.float64)
    return Fit(np.asarray(found.x, dtype=np.float64), covariance)


def equal_weights(sources: Sequence[str]) -> Floats:
    """A weight a row, so that the rows of every source add up to one."""
    names, counts = np.unique(np.array(sources), return_counts=True)
    rows = dict(zip(names.tolist(), counts.tolist(), strict=True))
    return np.array([1 / rows[source] for source in sources])


def leave_one_out(x: Cases, measured_s: Floats, sources: Sequence[str]) -> Floats:
    """Seconds that a fit without a row's own source predicts for the row."""
    names, found = np.array(sources), np.zeros(x.size)
    for name in np.unique(names):
        own = names == name
        others = fit(x.pick(~own), measured_s[~own], names[~own].tolist())
        found[own] = predict(x.pick(own), others.centre)
    return found


def _least_squares() -> Any:
    # scipy has no type stubs, and takes long to import where nothing is fitted.
    return import_module("scipy.optimize").least_squares
