"""Comparison of scenarios: ratios of estimates, without the errors that both share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.estimate.estimates import estimates_of_runs
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.interval import bounds, model_variance, slopes
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import Estimate


class Ratio(NamedTuple):
    """A value relative to the first scenario, with the bounds of its 80% interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Ratio:
        """Return the ratio multiplied by an exactly known factor."""
        return Ratio(self.value * factor, self.low * factor, self.high * factor)

    def inverse(self) -> Ratio:
        """Return the inverse ratio."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low)


class ScenarioComparison(NamedTuple):
    """A scenario compared with the first one."""

    step_time: Ratio
    tokens_per_s: Ratio
    cost: Ratio | None
    """None if a price is missing."""
    batch: float
    """Ratio of the batch sizes; some recipes scale the batch with the devices."""


def compare_scenarios(first: Estimate, second: Estimate, step_time: Ratio) -> ScenarioComparison:
    """Return ratios of two estimates, all with the relative interval of the step time."""
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
    first_request: EstimateRequest,
    second_request: EstimateRequest,
    evidence: Evidence,
    other: Evidence | None = None,
) -> Ratio:
    """Return the step time of the second request relative to the first.

    Shared errors cancel: an uncertain coefficient contributes only the difference of its slopes,
    and unseen software or an unseen device contributes nothing if both requests have it. Model
    error and assumed links are treated as independent. `other` is the second request's evidence if
    it differs; then all errors are independent.
    """
    evidences = (evidence, other or evidence)
    estimates = [
        estimates_of_runs([request.spec], [request.machine], by, request.resolved_software)
        for request, by in zip((first_request, second_request), evidences, strict=True)
    ]
    fits = [by.fit() for by in evidences]
    slope = [slopes(rows.x, fit.centre) for rows, fit in zip(estimates, fits, strict=True)]
    same_evidence = evidences[0] == evidences[1]
    differences = [slope[1] - slope[0]] if same_evidence else slope
    coefficient_variance = sum(
        s[0] @ fit.covariance @ s[0] for s, fit in zip(differences, fits, strict=False)
    )
    cases = [rows.x for rows in estimates]
    residual_variance = sum(
        model_variance(x, s, by.residual_sd)[0]
        for x, s, by in zip(cases, slope, evidences, strict=True)
    )
    level_variance = (
        evidence.levels.variance_between(cases[0], cases[1])[0]
        if same_evidence
        else sum(by.levels.variance(x)[0] for x, by in zip(cases, evidences, strict=True))
    )
    sd = float(np.sqrt(coefficient_variance + residual_variance + level_variance))
    value = float(estimates[1].step_time_s[0] / estimates[0].step_time_s[0])
    low, high = bounds(np.array([value]), np.array([sd]))
    return Ratio(value, float(low[0]), float(high[0]))
