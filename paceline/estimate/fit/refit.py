"""Coefficients after step times of one machine: what was known before, moved by its own steps."""

from __future__ import annotations

import numpy as np

from paceline.estimate.fit.evidence import Evidence, evidence_of_fit
from paceline.estimate.fit.interval import Z80, undetermined
from paceline.estimate.fit.posterior import PRIOR, Fit, moved, predict
from paceline.estimate.fit.probes import Errors
from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.model.coefficients import NAMES

NOISE = 0.06
"""What a good model misses of a step of one machine, as a deviation of the logarithm: half of what
it misses of a published one, whose conditions nobody states in full."""
PRIOR_ROWS = 4.0
"""Rows that what the formulas missed before counts for: a fit always meets a few rows well."""
SPREAD = 0.5
"""How far coefficients of one machine lie from those of all, in units of the widths that they had
before any step was looked at: a fit to many machines knows their middle better than each."""
ALIKE = 0.9
"""Correlation from which the data see only two coefficients' product or quotient."""


def refit(
    evidence: Evidence,
    x: Cases,
    measured_s: Floats,
    title: str,
    noise: float | Floats = NOISE,
    also: Errors | None = None,
) -> Evidence:
    """The evidence moved by step times of one machine, with their own residual deviation.

    The prior are the medians and the covariance of `evidence`, widened where that is of other
    machines. Every row counts once, with `noise` as the deviation of its logarithm (a number, or
    one a row). All rows belong into one call on the evidence from before: one that is given twice
    counts twice. Rows without a positive time are left out. `also` are probes beside the steps
    (`probes.errors`).
    """
    usable = np.isfinite(measured_s) & (measured_s > 0)
    if not usable.any():
        return evidence.model_copy(update={"title": title})
    scale = np.broadcast_to(np.asarray(noise, dtype=np.float64), measured_s.shape)[usable]
    x, measured_s = x.pick(usable), measured_s[usable]
    fit = moved(prior_of(evidence), x, measured_s, scale, np.ones(x.size), also)
    residual = _residual(evidence, x, measured_s, fit.centre)
    after = evidence_of_fit(title, fit, residual, evidence.rows + x.size, evidence.sources + 1)
    counted = {"own_rows": evidence.own_rows + x.size, "provenance": "stored profile"}
    return after.model_copy(update=counted)


def prior_of(evidence: Evidence) -> Fit:
    """What is known of one machine's coefficients before its own steps, or after them."""
    fit = evidence.fit()
    if evidence.own_rows:
        return fit
    return Fit(fit.centre, fit.covariance + SPREAD**2 * np.diag(np.diag(PRIOR.covariance)))


def unmoved(before: Evidence, after: Evidence) -> list[str]:
    """Coefficients about which the rows between the two said nothing."""
    return undetermined(after.fit(), np.sqrt(np.diag(prior_of(before).covariance)))


def alike(before: Evidence, after: Evidence) -> list[tuple[str, str]]:
    """Pairs of coefficients that the rows cannot tell apart: they moved, but only together.

    Their correlation is beyond 0.9 now and was not before.
    """
    old, new = _correlation(prior_of(before)), _correlation(after.fit())
    return [
        (NAMES[i], NAMES[j])
        for i in range(len(NAMES))
        for j in range(i + 1, len(NAMES))
        if abs(new[i, j]) > ALIKE >= abs(old[i, j])
    ]


def _residual(evidence: Evidence, x: Cases, measured_s: Floats, centre: Floats) -> dict[str, float]:
    """What the formulas miss by stack; one without rows keeps what it had."""
    missed = np.log(predict(x, centre) / measured_s)
    deviations = dict(evidence.residual_sd)
    for stack, before in deviations.items():
        rows = missed[x.has("stack", stack)]
        if not rows.size:
            continue
        now = float(np.quantile(np.abs(rows), 0.8)) / Z80
        variance = (PRIOR_ROWS * before**2 + rows.size * now**2) / (PRIOR_ROWS + rows.size)
        deviations[stack] = float(np.sqrt(variance))
    return deviations


def _correlation(fit: Fit) -> Floats:
    sd = np.sqrt(np.diag(fit.covariance))
    return np.asarray(fit.covariance / np.outer(sd, sd), dtype=np.float64)
