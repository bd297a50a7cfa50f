"""Scenarios compared: one estimate over another, without the errors that both share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.estimate.answer import Estimate
from paceline.estimate.estimates import estimates_of_runs
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.interval import bounds, own_variance, slopes
from paceline.estimate.question import Question


class Ratio(NamedTuple):
    """A figure of a scenario over the first one's; `low` and `high` hold 80 %."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Ratio:
        """The ratio of figures that differ by a factor that is known exactly."""
        return Ratio(self.value * factor, self.low * factor, self.high * factor)

    def inverse(self) -> Ratio:
        """The first one's figure over the scenario's."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low)


class ScenarioComparison(NamedTuple):
    """A scenario compared with the first one."""

    step_time: Ratio
    tokens_per_s: Ratio
    cost: Ratio | None
    """None where a price is missing."""
    batch: float
    """Of a step, over the first one's: a recipe's may grow with its devices."""


def compare_scenarios(first: Estimate, second: Estimate, step_time: Ratio) -> ScenarioComparison:
    """Two estimates side by side; batches and prices are exact, so all have the step's interval."""
    tokens = second.tokens_per_s * second.step_time_s / (first.tokens_per_s * first.step_time_s)
    samples = [round(each.samples_per_s * each.step_time_s) for each in (first, second)]
    costs = [each.training_cost.cost if each.training_cost else None for each in (first, second)]
    cost = None
    if costs[0] and costs[1] is not None:
        cost = step_time.times(costs[1] / costs[0] / step_time.value)
    return ScenarioComparison(
        step_time, step_time.inverse().times(tokens), cost, samples[1] / samples[0]
    )


def step_time_ratio(
    first: Question, second: Question, evidence: Evidence, other: Evidence | None = None
) -> Ratio:
    """Step time of the second over the first: what both share cancels.

    Coefficients move both, so only the difference of their slopes counts, and so do a stack or a
    device that no row was of; what the formulas miss, and what nobody states of links and devices,
    is taken as independent. `other` is the second one's evidence where it has its own: then all is
    independent.
    """
    evidences = (evidence, other or evidence)
    estimates = [
        estimates_of_runs([question.spec], [question.machine], by, question.software)
        for question, by in zip((first, second), evidences, strict=True)
    ]
    fits = [by.fit() for by in evidences]
    slope = [slopes(rows.x, fit.centre) for rows, fit in zip(estimates, fits, strict=True)]
    alike = evidences[0] == evidences[1]
    differences = [slope[1] - slope[0]] if alike else slope
    of_coefficients = sum(
        s[0] @ fit.covariance @ s[0] for s, fit in zip(differences, fits, strict=False)
    )
    cases = [rows.x for rows in estimates]
    missed = sum(
        own_variance(x, s, by.residual_sd)[0]
        for x, s, by in zip(cases, slope, evidences, strict=True)
    )
    of_levels = (
        evidence.levels.variance_between(cases[0], cases[1])[0]
        if alike
        else sum(by.levels.variance(x)[0] for x, by in zip(cases, evidences, strict=True))
    )
    sd = float(np.sqrt(of_coefficients + missed + of_levels))
    value = float(estimates[1].step_time_s[0] / estimates[0].step_time_s[0])
    low, high = bounds(np.array([value]), np.array([sd]))
    return Ratio(value, float(low[0]), float(high[0]))
