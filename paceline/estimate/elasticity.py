"""What would help most: how throughput follows each hardware figure of an estimate.

A step is made of seconds at some rate (products, memory, links) and of seconds that are fixed
(latency, host). With everything k times faster it is k times shorter, so by Euler's theorem on
homogeneous functions the elasticities of one training add up to 1.
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
from paceline.estimate.fit.interval import Z80, slopes
from paceline.estimate.fit.posterior import Fit
from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.model.coefficients import NAMES, named
from paceline.estimate.model.pipeline import followed_step
from paceline.estimate.question import Question

NUDGE = 1.02
"""Factor to either side by which a figure is varied for its elasticity."""


class Elasticity(Value):
    """One figure's: 0.3 says that 1 % faster brings 0.3 % more throughput."""

    figure: str
    value: float | None
    """What the estimate takes it for; None for what no data sheet states."""
    unit: str | None
    elasticity: float
    """d ln(throughput) / d ln(rate), at the estimate; of a latency or a host time the rate is its
    inverse."""
    low: float
    high: float
    """80 % by what the coefficients leave open; what the formulas themselves miss is not in it."""
    doubled_s: float
    """Seconds of the step if it were twice as fast; a bottleneck that moves on saves less."""


class _Figure(NamedTuple):
    name: str
    unit: str | None
    rates: tuple[str, ...] = ()
    """Fields of a case that are as many times larger; the first that is not 0 is shown."""
    seconds: Mapping[str, float] = MappingProxyType({})
    """Coefficients that are smaller by a power of as many times."""


FIGURES = (
    _Figure("matrix products", "FLOP/s", ("peak_narrow", "peak_16bit")),
    _Figure("memory bandwidth", "B/s", ("memory_bytes_per_s",)),
    _Figure("links inside the fast domain", "B/s", ("intra_bytes_per_s",)),
    _Figure("network", "B/s", ("inter_bytes_per_s", "leaf_bytes_per_s", "pod_bytes_per_s")),
    _Figure("latency of exchanges", None, seconds={"intra_start_s": 1, "inter_start_s": 1}),
    _Figure(
        "host and launches",
        None,
        # A product's start falls with the root of the peak (block.py); half is left to the host.
        seconds={
            **dict.fromkeys(("host_softmax_s", "host_fused_s", "host_torch_s"), 1.0),
            **dict.fromkeys(("host_sharded_s", "host_microbatch_s"), 1.0),
            **dict.fromkeys(("step_softmax_s", "step_fused_s", "step_torch_s"), 1.0),
            "gemm_start_s": 0.5,
        },
    ),
)


def elasticities(question: Question, evidence: Evidence) -> tuple[Elasticity, ...]:
    """Of a training by every figure, what helps most first; raises as `estimate` does."""
    spec, machine = question.spec, question.machine
    x = estimates_of_runs([spec], [machine], evidence, question.software).x
    fit = evidence.fit()
    moving = np.flatnonzero(slopes(x, fit.centre)[0]).tolist()
    answers = [_elasticity(x, fit, figure, moving) for figure in FIGURES]
    return tuple(sorted(answers, key=lambda each: -each.elasticity))


def _elasticity(x: Cases, fit: Fit, figure: _Figure, moving: Sequence[int]) -> Elasticity:
    """`moving` are the coefficients that the step depends on."""
    faster, slower, doubled = (_scaled(x, fit.centre, figure, k) for k in (NUDGE, 1 / NUDGE, 2.0))
    span = 2 * log(NUDGE)
    value = log(_seconds(*slower) / _seconds(*faster)) / span
    difference = (slopes(*slower, moving) - slopes(*faster, moving))[0] / span
    sd = float(np.sqrt(difference @ fit.covariance @ difference))
    shown = (float(getattr(x, name)[0]) for name in figure.rates)
    return Elasticity(
        figure=figure.name,
        value=next(filter(None, shown), None),
        unit=figure.unit,
        elasticity=value,
        low=value - Z80 * sd,
        high=value + Z80 * sd,
        doubled_s=_seconds(*doubled),
    )


def _scaled(x: Cases, centre: Floats, figure: _Figure, factor: float) -> tuple[Cases, Floats]:
    """The case and the coefficients with `factor` times as much of a figure."""
    rates = {name: float(getattr(x, name)[0]) * factor for name in figure.rates}
    shorter = np.array([figure.seconds.get(name, 0.0) for name in NAMES])
    return x.changed(**rates), centre - shorter * log(factor)


def _seconds(x: Cases, centre: Floats) -> float:
    return float(followed_step(x, named(centre)).total[0])
