"""Offers side by side: what one estimate is of another, with what both share left out of the interval."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.estimate.estimate import Estimate, Question, case_of, machine_of, spec_of
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.interval import bounds, own_variance, slopes
from paceline.estimate.model.case import cases_of
from paceline.estimate.model.coefficients import named
from paceline.estimate.model.pipeline import followed_step


class Ratio(NamedTuple):
    """A figure of an offer over the first one's; `low` and `high` hold 80 %."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Ratio:
        """The ratio of figures that differ by a factor that is known exactly."""
        return Ratio(self.value * factor, self.low * factor, self.high * factor)

    def inverse(self) -> Ratio:
        """The first one's figure over the offer's."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low)


class Against(NamedTuple):
    """An offer held against the first one."""

    step_time: Ratio
    tokens_per_s: Ratio
    cost: Ratio | None
    """None where a price is missing."""
    batch: float
    """Of a step, over the first one's: a recipe's may grow with its devices."""


def against(first: Estimate, offer: Estimate, step_time: Ratio) -> Against:
    """Two estimates side by side; batches and prices are exact, so the step time's interval is that of all."""
    tokens = offer.tokens_per_s * offer.step_time_s / (first.tokens_per_s * first.step_time_s)
    samples = [round(one.samples_per_s * one.step_time_s) for one in (first, offer)]
    bills = [one.bill.cost if one.bill else None for one in (first, offer)]
    cost = None
    if bills[0] and bills[1] is not None:
        cost = step_time.times(bills[1] / bills[0] / step_time.value)
    return Against(step_time, step_time.inverse().times(tokens), cost, samples[1] / samples[0])


def step_time_ratio(
    first: Question, second: Question, evidence: Evidence, other: Evidence | None = None
) -> Ratio:
    """Step time of the second over the first: what both share cancels.

    Coefficients move both, so only the difference of their slopes counts; what the formulas miss, and
    what nobody states of links and devices, is taken as independent. `other` is the second one's
    evidence where it has its own: then the coefficients are independent too.
    """
    rests_on = (evidence, other or evidence)
    fits = [one.fit() for one in rests_on]
    cases = [case_of(spec_of(q), machine_of(q), q.stack, q.compiled) for q in (first, second)]
    each = [cases_of([case]) for case in cases]
    times = [
        followed_step(x, named(fit.centre)).total[0] for x, fit in zip(each, fits, strict=True)
    ]
    slope = [slopes(x, fit.centre) for x, fit in zip(each, fits, strict=True)]
    moved = [slope[1] - slope[0]] if rests_on[0] == rests_on[1] else slope
    shared = sum(s[0] @ fit.covariance @ s[0] for s, fit in zip(moved, fits, strict=False))
    apart = sum(
        own_variance(x, s, one.residual_sd)[0]
        for x, s, one in zip(each, slope, rests_on, strict=True)
    )
    sd = float(np.sqrt(shared + apart))
    value = float(times[1] / times[0])
    low, high = bounds(np.array([value]), np.array([sd]))
    return Ratio(value, float(low[0]), float(high[0]))
