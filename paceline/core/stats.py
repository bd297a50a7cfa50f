"""Robust statistics of step times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.core.steps import FloatColumn

NORMAL_MAD = 1.4826
"""MAD x 1.4826 estimates the standard deviation of a normal distribution."""

SHORTEST_BLOCK = 5
"""Steps per bootstrap block: neighbours are correlated, so single steps must not be resampled."""

FEWEST_BLOCKS = 4
"""Into so many blocks a series is cut at least; where they get too short it has no interval."""
BOOTSTRAP_RESAMPLES = 1000
MAX_RESAMPLED = 5000
"""Steps; of longer series the order statistics tell the interval, which costs one sort."""

MOST_DECIMALS = 6
"""Of a printed time in seconds; finer ones are as good as exact."""

STUDENT_T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16,
                 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09)  # fmt: skip
"""97.5 % quantiles of Student's t for 1 to 20 degrees of freedom."""


@dataclass(frozen=True)
class Summary:
    """Location and spread of n values, in their unit."""

    n: int
    median: float
    mean: float
    mad: float
    p05: float
    p95: float
    low: float | None
    high: float | None

    @property
    def relative_spread(self) -> float:
        """1.4826 x MAD / median: a robust coefficient of variation."""
        return NORMAL_MAD * self.mad / self.median if self.median else 0.0

    @property
    def jitter_overhead(self) -> float:
        """Mean / median - 1: what spikes cost beyond the steady step."""
        return self.mean / self.median - 1 if self.median else 0.0


def summarize(values: FloatColumn, seed: int = 0) -> Summary:
    """Summary of at least one finite value, with a within-run interval from 20 values on."""
    median = float(np.median(values))
    interval = median_interval(values, seed)
    p05, p95 = np.quantile(values, [0.05, 0.95])
    return Summary(
        n=len(values),
        median=median,
        mean=float(np.mean(values)),
        mad=mad_around(values, median),
        p05=float(p05),
        p95=float(p95),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
    )


def mad_around(values: FloatColumn, centre: float) -> float:
    """Median absolute deviation from `centre`, with one copy of `values` in memory."""
    deviations = values - centre
    np.abs(deviations, out=deviations)
    return float(np.median(deviations, overwrite_input=True))


def median_interval(values: FloatColumn, seed: int = 0) -> tuple[float, float] | None:
    """95 % interval of the median by moving-block bootstrap (Kuensch 1989), None below 20 values.

    The block length follows the lag-1 autocorrelation (Carlstein 1986), and the interval is
    widened by Student's t for the few blocks there are. Above 5,000 values it comes from the order
    statistics instead (`ordered_interval`). Either way it holds the median of `values`.

    It says how well this run's steps determine this run's median. It does not cover the
    run-to-run change of the machine; only repeats do.
    """
    n = len(values)
    if n < FEWEST_BLOCKS * SHORTEST_BLOCK:
        return None
    if n > MAX_RESAMPLED:
        return ordered_interval(values)
    block = block_length(values)
    num_blocks = -(-n // block)
    rng = np.random.default_rng(seed)
    medians = np.empty(BOOTSTRAP_RESAMPLES)
    for row in range(BOOTSTRAP_RESAMPLES):
        starts = rng.integers(0, n - block + 1, size=num_blocks)
        medians[row] = np.median(values[(starts[:, None] + np.arange(block)).ravel()[:n]])
    low, high = np.quantile(medians, [0.025, 0.975])
    centre = float(np.median(values))
    widening = student_t_975(num_blocks - 1) / 1.96 * (n / (n - block + 1)) ** 0.5
    below, above = max(0.0, centre - float(low)), max(0.0, float(high) - centre)
    return centre - below * widening, centre + above * widening


def ordered_interval(values: FloatColumn) -> tuple[float, float]:
    """95 % interval of the median of many values by their order statistics.

    Its ends are the quantiles 0.5 -+ t sqrt(v / n). v is the long-run variance of "lies below the
    median": b times the variance of its means over b = sqrt(n) neighbours (batch means), at least
    the 1/4 of independent values. A quantile of the values is one of them, however skewed they are.
    """
    n = len(values)
    block = int(n**0.5)
    num_blocks = n // block
    centre = float(np.median(values))
    means = (values[: num_blocks * block] < centre).reshape(num_blocks, block).mean(axis=1)
    variance = max(block * float(means.var(ddof=1)), 0.25)
    reach = min(student_t_975(num_blocks - 1) * (variance / n) ** 0.5, 0.5)
    low, high = np.quantile(values, [0.5 - reach, 0.5 + reach])
    return float(low), float(high)


def student_t_975(degrees: int) -> float:
    """97.5 % quantile of Student's t, 1.96 beyond 20 degrees of freedom."""
    return STUDENT_T_975[degrees - 1] if degrees <= len(STUDENT_T_975) else 1.96


def block_length(values: FloatColumn) -> int:
    """Steps per block: (2 rho / (1 - rho^2))^(2/3) n^(1/3), at least 5 and at most n / 4.

    rho is the lag-1 autocorrelation with spikes clipped at four robust standard deviations.
    """
    n = len(values)
    centred = values - np.median(values)
    reach = 4 * NORMAL_MAD * float(np.median(np.abs(centred)))
    clipped = np.clip(centred, -reach, reach)
    power = float((clipped * clipped).sum())
    rho = float((clipped[1:] * clipped[:-1]).sum()) / power if power > 0 else 0.0
    rho = min(max(rho, 0.0), 0.95)
    best = (2 * rho / (1 - rho * rho)) ** (2 / 3) * n ** (1 / 3)
    return min(max(SHORTEST_BLOCK, int(np.ceil(best))), n // FEWEST_BLOCKS)


def group_medians(values: FloatColumn, most: int) -> FloatColumn:
    """At most `most` values: medians of equal consecutive groups, a shorter last one left out."""
    size = -(-len(values) // most)
    if size <= 1:
        return values
    groups = values[: len(values) // size * size].reshape(-1, size)
    # One group after the other: all at once would take a copy of millions of values.
    return np.array([np.median(group) for group in groups])


def printed_step_s(times: FloatColumn) -> float:
    """The decimal step in which times are printed (`29`, `28` -> 1.0), 0 if finer than 1e-6 s."""
    if not len(times):
        return 0.0
    for decimals in range(MOST_DECIMALS + 1):
        scaled = times * 10.0**decimals
        if bool((np.abs(scaled - np.round(scaled)) <= 1e-9 * np.abs(scaled) + 1e-12).all()):
            return 10.0**-decimals
    return 0.0
