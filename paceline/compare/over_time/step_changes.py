"""History of one recipe: step changes and slow drift in a series of run medians.

There are two stages, both on logarithms, so that a change is a ratio:

1. An exact L1 Potts fit (piecewise constant with a price per break; Friedrich et al. 2008,
   Weinmann, Storath and Demaret 2015) proposes breaks. Absolute deviations make it robust to one
   disturbed run. No level is shorter than two runs.
2. The weakest break is removed until each is larger than the margin and significant: Student's t
   on the pooled variation, corrected for the best of n - 2 tries, with 1% false alarms for the
   whole series. (A series of n has n - 3 places for one break, and some more for two.) If the two
   levels have 10 runs or more together and overlap, it must also be rarer than 2% in random orders
   of these runs (ranks, 199 orders).

Results on simulated series (docs/dev/evidence/statistics.md): a false alarm in about 1% of series
of 6 runs and in fewer of longer ones, at both 0.4% and 2% variation. A step of 2% at 0.4% variation
is found at its place in 95% of series of 5 + 5 runs and in 99% of longer ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from paceline.compare.over_time.environment import EnvironmentChange
from paceline.compare.significance import MARGIN, RunVariation, student_t
from paceline.core.metrics import metric_class
from paceline.core.stats import NORMAL_MAD
from paceline.core.steps import FloatColumn
from paceline.core.units import percent
from paceline.core.value import NonNegativeInt, Value
from paceline.core.window import relative_drift

FALSE_ALARMS = 0.01
"""Share of series without a change in which a false one may be found."""

BREAK_PRICE = 5.0
"""Price of a break in the Potts fit, in standard deviations of one run."""

REACH = 4.0
"""Maximum deviation of a run from its level, in standard deviations; larger ones are clipped."""

SMALLEST_NOISE = 0.001
"""Lower bound of the assumed run-to-run variation, relative."""

MIN_RUNS_FOR_DRIFT = 12
DRIFT_NOISES = 4.0
"""Minimum size of a drift, in its own standard errors."""

MAX_LOG = 50.0
"""Upper bound of a log ratio. Larger ones carry no information and soon overflow."""

MIN_LEVEL_RUNS = 3
"""Minimum runs of a level. Fewer disturbed runs may be adjacent by chance."""

SHORT_LEVEL = 4
"""Levels of at most this many runs are tested with their own variation too, if it is larger."""

PERMUTATIONS = 199
MAX_PERMUTATION_P = 0.02
"""Share of random orders in which a break as clear as a reported one may be found."""
MIN_PERMUTED_RUNS = 10
"""Minimum runs for the test in random orders. With fewer, even a clear break can be by chance."""

POWER_Z = 1.2816
"""90% quantile of the normal distribution."""


@dataclass(frozen=True)
class SeriesLevel:
    """Rows `start` to `stop` (exclusive) that share one level, in the series' unit."""

    start: int
    stop: int
    value: float

    @property
    def n(self) -> int:
        """Number of runs on this level."""
        return self.stop - self.start


@dataclass(frozen=True)
class StepChange:
    """A step change: between the rows `at - 1` and `at` the value is multiplied by `ratio`."""

    at: int
    ratio: float
    low: float
    """Lower end of the 95% interval of the ratio, from the pooled variation for a known place."""
    high: float
    """Upper end of the 95% interval of the ratio."""
    n_before: int
    n_after: int


@dataclass(frozen=True)
class Drift:
    """A steady change: the last value divided by the first is `ratio`."""

    ratio: float
    low: float
    """Lower end of the 95% interval of the ratio."""
    high: float
    """Upper end of the 95% interval of the ratio."""


@dataclass(frozen=True)
class SeriesFit:
    """A series fitted by levels with step changes between them, or by one level with a drift."""

    levels: tuple[SeriesLevel, ...]
    changes: tuple[StepChange, ...]
    drift: Drift | None
    fitted: FloatColumn
    """Fitted value of each row: its level, or its point on the drift's line."""
    noise: float | None
    """Relative standard deviation of one run around the fit; None below three runs."""
    findable: float | None
    """Relative change at the last `findable_runs` runs that is found in 9 of 10 cases."""
    findable_runs: int


def fit_series(values: FloatColumn, margin: float = MARGIN) -> SeriesFit:
    """Return levels, step changes and drift of at least one positive value, oldest first.

    The runs should be independent and differ only by what happens between them. Variation that
    lasts from run to run (lag-1 autocorrelation) widens the noise.
    """
    y = np.log(values)
    noise = neighbor_noise(y)
    price = BREAK_PRICE * noise
    cuts = [0, *potts_breaks(y, price), len(y)]
    fit = _Fit.of(y, cuts, noise)
    while (weakest := fit.weakest(margin)) is not None or (
        weakest := _chance_break(y, cuts, noise)
    ) is not None:
        cuts.pop(weakest + 1)
        fit = _Fit.of(y, cuts, noise)
    drift, line = _drift(values, fit, price, margin)
    if drift is not None:
        fit = _Fit.of(y - line, [0, len(y)], noise)
    levels, runs = fit.levels(), min(5, len(y) // 2)
    return SeriesFit(
        levels=tuple(levels),
        changes=tuple(fit.changes()),
        drift=drift,
        fitted=np.repeat([level.value for level in levels], np.diff(fit.cuts)) * np.exp(line),
        noise=fit.deviation if fit.freedom >= 2 else None,
        findable=fit.findable(runs, margin),
        findable_runs=runs,
    )


def _chance_break(y: FloatColumn, cuts: Sequence[int], noise: float) -> int | None:
    """Return the break that the order of the runs supports least, or None if it supports all.

    Each break between levels that overlap is tested on the runs of both in random orders. The test
    is exact for any noise that does not depend on the order, such as runs with two states.
    """
    p_values = [
        0.0 if _are_apart(y[before:at], y[at:after], noise) else _permutation_p(y[before:after])
        for before, at, after in zip(cuts[:-2], cuts[1:-1], cuts[2:], strict=True)
    ]
    if not p_values or max(p_values) <= MAX_PERMUTATION_P:
        return None
    return int(np.argmax(p_values))


def _are_apart(before: FloatColumn, after: FloatColumn, noise: float) -> bool:
    """Return whether two levels are clearly different without a test of the order of their runs.

    No run of one level belongs to the other: is nearer to its median and within REACH of it. Ranks
    cannot show this for three runs at an end, however far they are from the others.
    """
    if min(len(before), len(after)) < MIN_LEVEL_RUNS:
        return False
    centres = float(np.median(before)), float(np.median(after))
    if abs(centres[1] - centres[0]) <= REACH * noise:
        return False
    return not any(
        ((away < REACH * noise) & (away < np.abs(part - centre))).any()
        for part, centre, other in ((before, *centres), (after, *centres[::-1]))
        for away in [np.abs(part - other)]
    )


def _permutation_p(y: FloatColumn) -> float:
    """Return how often random orders of `y` have a break as clear as its best; 0 if `y` is short.

    The statistic is the largest |mean rank after - mean rank before| in standard errors, over all
    places with two runs on both sides.
    """
    n = len(y)
    if n < MIN_PERMUTED_RUNS:
        return 0.0
    ranks = np.searchsorted(np.sort(y), y, "left") + np.searchsorted(np.sort(y), y, "right")
    ranks = ranks - ranks.mean()
    places = np.arange(1, n)
    weights = np.sqrt(places * (n - places))
    rng = np.random.default_rng(0)
    orders = np.vstack([ranks, rng.permuted(np.tile(ranks, (PERMUTATIONS, 1)), axis=1)])
    clearest = np.abs(orders.cumsum(axis=1)[:, :-1] / weights)[:, 1:-1].max(axis=1)
    return float((clearest >= clearest[0] * (1 - 1e-12)).mean())


def neighbor_noise(y: FloatColumn) -> float:
    """Return the deviation of one value, robust to steps: 1.4826 median |y' - y| / sqrt 2."""
    if len(y) < 2:
        return SMALLEST_NOISE
    jumps = np.abs(np.diff(y))
    return max(NORMAL_MAD * float(np.median(jumps)) / 2**0.5, SMALLEST_NOISE)


def potts_breaks(y: FloatColumn, price: float) -> list[int]:
    """Return the first rows of all levels but the first, with at least two rows per level.

    The fit minimizes sum |y - level| + price x breaks exactly. The best level of a segment is one
    of its values. It is therefore enough to keep, for each value, the cheapest fit that ends on it,
    with one row on the last level or with more. n rows take O(n^2) time and n^2 bits for the
    traceback.
    """
    candidates, n = np.unique(y), len(y)
    single = np.abs(candidates - y[0])
    more = np.full(len(candidates), np.inf)
    second = np.zeros((n, len(candidates)), dtype=np.bool_)
    """True if row j is the second on its level in the cheapest fit with more than one."""
    previous = np.zeros(n, dtype=np.int64)
    """Index of the level that ends before row j if a new one begins there."""
    for j in range(1, n):
        cost = np.abs(candidates - y[j])
        previous[j] = np.argmin(more)
        second[j] = single < more
        single, more = more[previous[j]] + price + cost, np.minimum(single, more) + cost
    breaks: list[int] = []
    j, level = n - 1, int(np.argmin(more))
    while j > 0:
        if not second[j, level]:
            j -= 1
            continue
        if j > 1:
            breaks.append(j - 1)
            level = int(previous[j - 1])
        j -= 2
    return breaks[::-1]


@dataclass(frozen=True)
class _Fit:
    """One segmentation of the series: the centre of each level, and the variation around them."""

    cuts: tuple[int, ...]
    centres: FloatColumn
    deviation: float
    """Pooled standard deviation around the centres."""
    correlation: float
    """Lag-1 autocorrelation within the levels, 0 to 0.8."""
    deviations: FloatColumn
    """Standard deviation of each level, without clipping; 0 with fewer than three rows."""
    has_outliers: bool
    """True if some row was clipped."""

    @classmethod
    def of(cls, y: FloatColumn, cuts: list[int], noise: float) -> _Fit:
        raw = [y[a:b] for a, b in pairwise(cuts)]
        parts = [_clip_outliers(part, REACH * noise) for part in raw]
        residuals = [part - part.mean() for part in parts]
        power = sum(float((r * r).sum()) for r in residuals)
        lagged_products = sum(float((r[1:] * r[:-1]).sum()) for r in residuals)
        return cls(
            cuts=tuple(cuts),
            centres=np.array([part.mean() for part in parts]),
            deviation=(power / max(1, len(y) - len(parts))) ** 0.5,
            correlation=min(max(lagged_products / power, 0.0), 0.8) if power > 0 else 0.0,
            deviations=np.array(
                [float(r.std(ddof=1)) if len(r) >= MIN_LEVEL_RUNS else 0.0 for r in raw]
            ),
            has_outliers=any(bool((r != p).any()) for r, p in zip(raw, parts, strict=True)),
        )

    @property
    def n(self) -> int:
        """Number of rows."""
        return self.cuts[-1]

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the pooled deviation."""
        return self.n - len(self.centres)

    @property
    def deviation_of_a_mean(self) -> float:
        """Standard error of a mean times sqrt n: 1 + 2 rho / (1 - rho) values count as one."""
        rho = self.correlation
        return max(self.deviation, SMALLEST_NOISE) * ((1 + rho) / (1 - rho)) ** 0.5

    def weakest(self, margin: float) -> int | None:
        """Return the break to remove first, or None if all are significant."""
        if len(self.centres) == 1:
            return None
        sizes, errors = np.abs(np.diff(self.centres)), self._errors()
        failing = (sizes < np.log1p(margin)) | (sizes < self._critical() * errors)
        brief = self._are_brief()
        failing |= brief[:-1] | brief[1:]
        if not failing.any():
            return None
        return int(np.argmin(np.where(failing, sizes / errors, np.inf)))

    def _are_brief(self) -> npt.NDArray[np.bool_]:
        """Return which levels are too short to be levels.

        Two runs between other levels always are. Two runs at either end are if other runs are
        disturbed.
        """
        few = np.diff(self.cuts) < MIN_LEVEL_RUNS
        inside = np.ones(len(few), dtype=np.bool_)
        inside[[0, -1]] = False
        return few & (inside | self.has_outliers)

    def levels(self) -> list[SeriesLevel]:
        """Return the levels in the series' unit."""
        values = np.exp(self.centres)
        return [
            SeriesLevel(a, b, float(v))
            for (a, b), v in zip(pairwise(self.cuts), values, strict=True)
        ]

    def changes(self) -> list[StepChange]:
        """Return the step changes between the levels, with 95% intervals."""
        sizes, errors = np.diff(self.centres), self._errors()
        reach = student_t(0.975, self.freedom) * errors
        counts = np.diff(self.cuts)
        return [
            StepChange(
                at=self.cuts[k + 1],
                ratio=float(np.exp(sizes[k])),
                low=float(np.exp(sizes[k] - reach[k])),
                high=float(np.exp(sizes[k] + reach[k])),
                n_before=int(counts[k]),
                n_after=int(counts[k + 1]),
            )
            for k in range(len(sizes))
        ]

    def findable(self, runs: int, margin: float) -> float | None:
        """Return the relative change at the last `runs` rows that would be found with 90% power.

        The deviation is taken at the upper end of its one-sided 90% interval.
        """
        if runs < 2 or self.freedom < 3:
            return None
        error = (
            _upper_factor(self.freedom)
            * self.deviation_of_a_mean
            * (1 / runs + 1 / (self.n - runs)) ** 0.5
        )
        critical = student_t(1 - FALSE_ALARMS / (2 * (self.n - 2)), self.n - 2) * error
        return float(np.expm1(min(max(critical, np.log1p(margin)) + POWER_Z * error, MAX_LOG)))

    def _errors(self) -> FloatColumn:
        counts = np.diff(self.cuts)
        alone = np.where(counts <= SHORT_LEVEL, self.deviations, 0.0)
        squares = np.maximum(self.deviation_of_a_mean, alone) ** 2 / counts
        return np.sqrt(squares[:-1] + squares[1:])

    def _critical(self) -> float:
        return student_t(1 - FALSE_ALARMS / (2 * (self.n - 2)), self.freedom)

    def cost(self, y: FloatColumn, price: float) -> float:
        """Return the Potts cost of this segmentation."""
        parts = [y[a:b] for a, b in pairwise(self.cuts)]
        deviations = sum(float(np.abs(part - np.median(part)).sum()) for part in parts)
        return deviations + price * (len(parts) - 1)


def _clip_outliers(part: FloatColumn, reach: float) -> FloatColumn:
    centre = np.median(part)
    return np.clip(part, centre - reach, centre + reach)


def _upper_factor(freedom: int) -> float:
    """Return the factor from a deviation to the upper end of its one-sided 90% interval.

    The factor is sqrt(f / chi^2 quantile), by the cube-root approximation of Wilson and Hilferty
    (1931).
    """
    step = 2 / (9 * freedom)
    return (1 - step - POWER_Z * step**0.5) ** -1.5


def _drift(
    values: FloatColumn, fit: _Fit, price: float, margin: float
) -> tuple[Drift | None, FloatColumn]:
    """Fit a line to the logarithms, or return no drift if levels are cheaper or it is within noise.

    The values of the line are centred around 0; without a drift they are all 0.
    """
    flat = np.zeros(len(values))
    if len(values) < MIN_RUNS_FOR_DRIFT:
        return None, flat
    change, noise = relative_drift(values)
    if abs(change) < max(np.log1p(margin), DRIFT_NOISES * max(noise, SMALLEST_NOISE)):
        return None, flat
    y = np.log(values)
    line = change * np.linspace(-0.5, 0.5, len(y))
    residuals = y - line
    if float(np.abs(residuals - np.median(residuals)).sum()) + price >= fit.cost(y, price):
        return None, flat
    reach = 1.96 * noise
    ratio, low, high = (float(np.exp(change + side * reach)) for side in (0, -1, 1))
    return Drift(ratio, low, high), line


class LevelChange(Value):
    """A step change in the series."""

    last_before: str
    """Name of the last run before the step; `first_after` is the first run after it."""
    first_after: str
    date_before: str
    date: str
    """Date of the first run after the step."""
    ratio: float
    """New level divided by old level."""
    low: float
    """Lower end of the 95% interval of the ratio."""
    high: float
    """Upper end of the 95% interval of the ratio."""
    old_level: float
    new_level: float
    n_before: NonNegativeInt
    n_after: NonNegativeInt
    worse: bool | None
    """True if the change is for the worse; None for a metric without a better direction."""
    environment: tuple[EnvironmentChange, ...]
    environment_note: str | None = None
    """Reason why no environment change is listed, or how close to the step it was recorded."""


class SlowDrift(Value):
    """A steady change over the whole series."""

    ratio: float
    """Last value divided by the first."""
    low: float
    high: float
    worse: bool | None


class SeriesPoint(Value):
    """One value of the series: a run, or the median of a group of repeats."""

    runs: tuple[str, ...]
    date: str
    value: float
    level: float
    """Value of the fitted series at this point, without noise."""


class RunSeries(Value):
    """Comparable runs in time order."""

    name: str
    key: str | None
    """Content key of the workload; None for imported logs."""
    n_runs: NonNegativeInt
    points: tuple[SeriesPoint, ...]
    changes: tuple[LevelChange, ...]
    drift: SlowDrift | None
    noise: float | None
    """Relative standard deviation of one value around its level."""
    variation: RunVariation | None = None
    """Variation of single runs within a day and between days; None below five days. `compare` uses
    it for runs that are few or not interleaved."""
    findable: float | None
    """Smallest change at the last `findable_points` values that would be found in 9 of 10 cases."""
    findable_points: NonNegativeInt
    notes: tuple[str, ...] = ()


class History(Value):
    """Output of `paceline runs history --json`."""

    schema_version: int = 1
    recipe: str
    metric: str
    unit: str
    margin: float
    series: tuple[RunSeries, ...]
    left_out: dict[str, tuple[str, ...]]
    """Runs that are in no series, by reason."""

    @property
    def slowdowns(self) -> int:
        """Number of steps and drifts for the worse."""
        directions = [
            c.worse for s in self.series for c in (*s.changes, *([s.drift] if s.drift else []))
        ]
        return sum(worse is True for worse in directions)


def change_text(change: LevelChange | SlowDrift, metric: str) -> str:
    """Return the size in words: `2.1% slower`; without a better direction `2.1% higher`."""
    ratio, worse = change.ratio, change.worse
    if worse is None:
        return f"{percent(abs(ratio - 1))} {'higher' if ratio > 1 else 'lower'}"
    words = ("slower", "faster") if metric_class(metric).is_speed else ("worse", "better")
    return f"{percent(abs(ratio - 1))} {words[0] if worse else words[1]}"
