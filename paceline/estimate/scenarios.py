"""Comparison of scenarios, and sensitivity of the throughput to each hardware property.

Ratios of estimates leave out the errors that both share. A step consists of work at some rate
(GEMMs, memory, links) and of fixed times (latency, CPU launch overhead). If everything were k times
faster, the step would be k times shorter. By Euler's theorem on homogeneous functions, the
elasticities of one run therefore sum to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from paceline.core.value import Value
from paceline.estimate.estimates import estimates_of_runs
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.interval import Z80, bounds, model_variance, slopes
from paceline.estimate.fit.posterior import Fit
from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.model.coefficients import NAMES, coefficient_values
from paceline.estimate.model.pipeline import simulated_step
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
    and unseen software or an unseen device contributes nothing if both requests have it. The
    deviation of the source cancels if both have the same software and device. Model error and
    assumed links are treated as independent. `other` is the second request's evidence if it
    differs; then all errors are independent.
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


NUDGE = 1.02
"""Factor by which a property is varied in both directions to compute its elasticity."""


class Elasticity(Value):
    """Elasticity of the throughput: at 0.3, 1% faster hardware gives 0.3% more throughput."""

    figure: str
    value: float | None
    """Value used by the estimate; None if data sheets do not state it."""
    unit: str | None
    elasticity: float
    """d ln(throughput) / d ln(rate) at the estimate; the rate of a latency is its inverse."""
    low: float
    high: float
    """Bounds of the 80% interval from the coefficients' uncertainty; excludes model error."""
    step_time_if_doubled_s: float
    """Step time in seconds if the property were twice as fast, including a moved bottleneck."""


class _Figure(NamedTuple):
    name: str
    unit: str | None
    rates: tuple[str, ...] = ()
    """Fields of a case that scale with the property; the first nonzero one is reported."""
    seconds: Mapping[str, float] = MappingProxyType({})
    """Coefficients that scale with the inverse of the property, with their exponent."""


FIGURES = (
    _Figure("GEMM throughput", "FLOP/s", ("peak_narrow", "peak_16bit")),
    _Figure("memory bandwidth", "B/s", ("memory_bytes_per_s",)),
    _Figure("NVLink domain bandwidth", "B/s", ("intra_bytes_per_s",)),
    _Figure(
        "network bandwidth", "B/s", ("inter_bytes_per_s", "leaf_bytes_per_s", "pod_bytes_per_s")
    ),
    _Figure("communication latency", None, seconds={"intra_start_s": 1, "inter_start_s": 1}),
    _Figure(
        "CPU launch overhead",
        None,
        # The start time of a GEMM scales with the root of the peak (block.py), hence exponent 0.5.
        seconds={
            **dict.fromkeys(("host_softmax_s", "host_fused_s", "host_torch_s"), 1.0),
            **dict.fromkeys(("host_sharded_s", "host_microbatch_s"), 1.0),
            **dict.fromkeys(("step_softmax_s", "step_fused_s", "step_torch_s"), 1.0),
            "gemm_start_s": 0.5,
        },
    ),
)


def elasticities(request: EstimateRequest, evidence: Evidence) -> tuple[Elasticity, ...]:
    """Return the elasticity of each property, largest first; raises as `estimate` does."""
    spec, machine = request.spec, request.machine
    x = estimates_of_runs([spec], [machine], evidence, request.resolved_software).x
    fit = evidence.fit()
    sensitive = np.flatnonzero(slopes(x, fit.centre)[0]).tolist()
    answers = [_elasticity(x, fit, figure, sensitive) for figure in FIGURES]
    return tuple(sorted(answers, key=lambda each: -each.elasticity))


def _elasticity(x: Cases, fit: Fit, figure: _Figure, sensitive: Sequence[int]) -> Elasticity:
    """Return the elasticity of one property; the step depends on the coefficients `sensitive`."""
    faster, slower, at_double = (_scaled(x, fit.centre, figure, k) for k in (NUDGE, 1 / NUDGE, 2.0))
    span = 2 * log(NUDGE)
    value = log(_seconds(*slower) / _seconds(*faster)) / span
    difference = (slopes(*slower, sensitive) - slopes(*faster, sensitive))[0] / span
    sd = float(np.sqrt(difference @ fit.covariance @ difference))
    values = (float(getattr(x, name)[0]) for name in figure.rates)
    return Elasticity(
        figure=figure.name,
        value=next(filter(None, values), None),
        unit=figure.unit,
        elasticity=value,
        low=value - Z80 * sd,
        high=value + Z80 * sd,
        step_time_if_doubled_s=_seconds(*at_double),
    )


def _scaled(x: Cases, centre: Floats, figure: _Figure, factor: float) -> tuple[Cases, Floats]:
    """Return the case and the coefficients with the property scaled by `factor`."""
    rates = {name: float(getattr(x, name)[0]) * factor for name in figure.rates}
    shorter = np.array([figure.seconds.get(name, 0.0) for name in NAMES])
    return x.with_numbers(**rates), centre - shorter * log(factor)


def _seconds(x: Cases, centre: Floats) -> float:
    return float(simulated_step(x, coefficient_values(centre)).total[0])
