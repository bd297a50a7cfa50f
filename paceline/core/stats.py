"""Robust statistics of step times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.core.steps import FloatColumn

NORMAL_MAD = 1.4826
"""Factor from MAD to the standard deviation of a normal distribution."""

SHORTEST_BLOCK = 5
"""Minimum steps per bootstrap block. Neighboring steps are correlated, so blocks are resampled
instead of single steps."""

FEWEST_BLOCKS = 4
"""Minimum number of blocks per series. If they become too short, there is no interval."""
BOOTSTRAP_RESAMPLES = 1000
RESAMPLED_AT_ONCE = 1 << 17
"""Values of the resamples that are in memory at once."""
MAX_RESAMPLED = 5000
"""Maximum number of resampled steps. Longer series use order statistics, which cost one sort."""

CHECKED_AT_ONCE = 1 << 16
"""Times whose decimals are counted at once, in memory of their own."""
MAX_DECIMALS = 6
"""Decimals of a printed time in seconds. Finer times count as exact."""

STUDENT_T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16,
                 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09)  # fmt: skip
"""Quantiles of Student's t at 97.5% for 1 to 20 degrees of freedom."""


@dataclass(frozen=True)
class Summary:
    """Location and spread of n values, in the unit of the values."""

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
        """Robust coefficient of variation, 1.4826 x MAD / median."""
        return NORMAL_MAD * self.mad / self.median if self.median else 0.0

    @property
    def jitter_overhead(self) -> float:
        """Jitter overhead, mean / median - 1: the cost of spikes relative to the median step."""
        return self.mean / self.median - 1 if self.median else 0.0


def summarize(values: FloatColumn, seed: int = 0) -> Summary:
    """Summarize one or more finite values, with a within-run interval from 20 values on."""
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
    """Return the median absolute deviation from `centre`. It makes one copy of `values`."""
    deviations = values - centre
    np.abs(deviations, out=deviations)
    return float(np.median(deviations, overwrite_input=True))


def median_interval(values: FloatColumn, seed: int = 0) -> tuple[float, float] | None:
    """Return the 95% interval of the median by moving-block bootstrap (Kuensch 1989).

    Returns None below 20 values. The block length follows the lag-1 autocorrelation (Carlstein
    1986). The interval is widened by Student's t, because there are few blocks. Above 5,000 values
    the interval comes from order statistics instead (`ordered_interval`). In both cases it contains
    the median of `values`.

    The interval states how precisely the steps of one run determine its median. It does not cover
    run-to-run variation of the machine, which only repeated runs show.
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
    at_once = max(1, RESAMPLED_AT_ONCE // n)
    for row in range(0, BOOTSTRAP_RESAMPLES, at_once):
        rows = medians[row : row + at_once]
        starts = rng.integers(0, n - block + 1, size=(len(rows), num_blocks, 1))
        samples = values[(starts + np.arange(block)).reshape(len(rows), -1)[:, :n]]
        rows[:] = np.median(samples, axis=1, overwrite_input=True)
    low, high = np.quantile(medians, [0.025, 0.975])
    centre = float(np.median(values))
    widening = student_t_975(num_blocks - 1) / 1.96 * (n / (n - block + 1)) ** 0.5
    below, above = max(0.0, centre - float(low)), max(0.0, float(high) - centre)
    return centre - below * widening, centre + above * widening


def ordered_interval(values: FloatColumn) -> tuple[float, float]:
    """Return the 95% interval of the median of many values from their order statistics.

    The ends are the quantiles 0.5 -+ t sqrt(v / n). v is the long-run variance of the indicator "is
    below the median": b times the variance of its means over b = sqrt(n) neighbors (batch means),
    but at least 1/4, the value for independent samples. A quantile of the values is one of them,
    regardless of their skew.
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
    """Return the 97.5% quantile of Student's t; 1.96 beyond 20 degrees of freedom."""
    return STUDENT_T_975[degrees - 1] if degrees <= len(STUDENT_T_975) else 1.96


def block_length(values: FloatColumn) -> int:
    """Return the steps per block: (2 rho / (1 - rho^2))^(2/3) n^(1/3), between 5 and n / 4.

    rho is the lag-1 autocorrelation, with spikes clipped at four robust standard deviations.
    """
    n = len(values)
    deviations_from_median = values - np.median(values)
    reach = 4 * NORMAL_MAD * float(np.median(np.abs(deviations_from_median)))
    residuals = np.clip(deviations_from_median, -reach, reach)
    power = float((residuals * residuals).sum())
    rho = float((residuals[1:] * residuals[:-1]).sum()) / power if power > 0 else 0.0
    rho = min(max(rho, 0.0), 0.95)
    best = (2 * rho / (1 - rho * rho)) ** (2 / 3) * n ** (1 / 3)
    return min(max(SHORTEST_BLOCK, int(np.ceil(best))), n // FEWEST_BLOCKS)


def group_medians(values: FloatColumn, most: int) -> FloatColumn:
    """Return up to `most` medians of equal consecutive groups; a shorter last group is dropped."""
    size = -(-len(values) // most)
    if size <= 1:
        return values
    groups = values[: len(values) // size * size].reshape(-1, size)
    # One group at a time, because all groups at once would copy millions of values.
    return np.array([np.median(group) for group in groups])


def printed_step_s(times: FloatColumn) -> float:
    """Return the resolution of printed times (`29`, `28` -> 1.0); 0 if finer than 1e-6 s."""
    decimals = 0
    for first in range(0, len(times), CHECKED_AT_ONCE):
        part = times[first : first + CHECKED_AT_ONCE]
        while not _has_decimals(part, decimals):
            if decimals == MAX_DECIMALS:
                return 0.0
            decimals += 1
    return 10.0**-decimals if len(times) else 0.0


def _has_decimals(values: FloatColumn, decimals: int) -> bool:
    """Return whether no value has more decimal places, but for floating-point errors."""
    scaled = values * 10.0**decimals
    return bool((np.abs(scaled - np.round(scaled)) <= 1e-9 * np.abs(scaled) + 1e-12).all())
