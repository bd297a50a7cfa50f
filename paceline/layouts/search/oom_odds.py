"""How likely layouts run out of memory once one has: all share much of the estimate's error."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceline.estimate.model.case import Floats

SHARED_SCALE = 0.15
"""Of ln(needed / estimated memory), which all layouts share: Student's t with 3 degrees of freedom,
since an estimate may be far off."""
OWN_SD = 0.08
"""Deviation of one layout's error from the shared one."""
ODD = 0.03
"""Runs that run out, or fit, for reasons of their own."""
LOGISTIC = 1.702
"""The logistic function of 1.702 x is the normal distribution within 0.01."""
ERRORS = np.linspace(-2.0, 2.0, 161)
"""Values of the shared error over which it is summed."""
BEYOND = 0.5
"""How far above and below all layouts an unknown limit may lie."""


def odds_after(
    needed: Floats, limit: Floats, ran_out: Mapping[int, bool], before: Floats
) -> Floats:
    """Probability, 0-1, of each layout to run out; `ran_out` says of rows whether they did.

    `needed` and `limit` are bytes, an unknown limit is infinite. Until a layout has run out, and
    where nothing is known of the needs, they are those from `before`.
    """
    if not any(ran_out.values()) or np.ptp(needed) == 0:
        return before
    has_limit = np.isfinite(limit)
    far = np.log(needed / np.where(has_limit, limit, needed.max()))
    errors, weights = _prior(far, bool(has_limit.all()))
    rows = np.array(list(ran_out), dtype=np.int64)
    out = np.array(list(ran_out.values()))
    likely = ODD + (1 - 2 * ODD) * _beyond(far[rows], errors)
    logs = np.log(weights) + np.log(np.where(out[:, None], likely, 1 - likely)).sum(axis=0)
    posterior = np.exp(logs - logs.max())
    return np.asarray(_beyond(far, errors) @ (posterior / posterior.sum()), dtype=np.float64)


def _prior(far: Floats, has_limits: bool) -> tuple[Floats, Floats]:
    """(errors, their weights); where no limit is known each place of it counts the same."""
    if has_limits:
        return ERRORS, (1 + (ERRORS / SHARED_SCALE) ** 2 / 3) ** -2
    errors = np.linspace(-BEYOND, float(np.ptp(far)) + BEYOND, len(ERRORS))
    return errors, np.ones_like(errors)


def _beyond(far: Floats, errors: Floats) -> Floats:
    """(layouts, errors): probability that a layout needs more than the limit."""
    z = LOGISTIC * (far[:, None] + errors[None, :]) / OWN_SD
    return 1 / (1 + np.exp(-np.clip(z, -50.0, 50.0)))
