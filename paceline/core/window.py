"""Steady-state window: the steps from which figures are computed.

Warm-up ends at the first step inside a band around the median of the second half, if at least 4 of
the 5 steps from it on are in the band. The half-width of the band is the largest of three scaled
MADs, the log's resolution and 0.1%. If the first quarter of the remaining steps is still slower
than the second half, the warm-up is extended. A temporary level of step times is reported in the
record.

A step time without a single level is bimodal or has no stable level. Two levels are separated at
the split of the sorted times that maximizes the variance between both parts (Otsu, IEEE Trans. SMC
9, 1979): w0 w1 (m1 - m0)^2, with shares w and means m.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from paceline.core.result import LevelShift, WindowRecord
from paceline.core.stats import NORMAL_MAD, group_medians, mad_around
from paceline.core.steps import FloatColumn, IntColumn, Steps
from paceline.core.units import compact

MIN_STEPS = 20
"""Minimum number of steps. With fewer, one level often looks like two by chance."""
MIN_SHARE = 0.25
"""Minimum share of the rarer level. Rarer values are spikes, which do not affect the median."""
MIN_EXPLAINED_VARIANCE = 0.95
"""Minimum share of the variance between the levels. Splitting one normal distribution explains
0.64."""
MIN_DISTANCE = 0.02
"""Minimum distance between the levels, relative to the lower one."""
MAX_SAMPLE = 5000


@dataclass(frozen=True)
class TwoLevels:
    """Mean times of two levels in seconds, and the share of steps at the upper level."""

    low_s: float
    high_s: float
    high_share: float


def two_levels(times: FloatColumn, resolution_s: float = 0.0) -> TwoLevels | None:
    """Return the two levels of bimodal step times (seconds); None if the times are not bimodal.

    Levels that differ by one printed digit (`resolution_s`) are one level that was rounded.
    """
    if len(times) < MIN_STEPS:
        return None
    values = np.sort(_sample(times))
    n, shares = len(values), np.arange(1, len(values)) / len(values)
    sums = np.cumsum(values)
    low, high = sums[:-1] / np.arange(1, n), (sums[-1] - sums[:-1]) / np.arange(n - 1, 0, -1)
    between = np.where(
        np.minimum(shares, 1 - shares) >= MIN_SHARE, shares * (1 - shares) * (high - low) ** 2, 0
    )
    at = int(np.argmax(between))
    distance = high[at] - low[at]
    is_separated = distance > max(MIN_DISTANCE * low[at], 1.5 * resolution_s)
    if not is_separated or between[at] < MIN_EXPLAINED_VARIANCE * np.var(values):
        return None
    return TwoLevels(float(low[at]), float(high[at]), float(1 - shares[at]))


def uneven_warning(times: FloatColumn) -> str:
    """Return the warning for figures from an uneven window with these step times (seconds)."""
    mean = f"the figures are those of the mean step, {compact(float(np.mean(times)))} s"
    levels = two_levels(times)
    if levels is None:
        return f"uneven-steps: no five steps in a row are on one level; {mean}"
    low, high = (f"about {compact(level_s)} s" for level_s in (levels.low_s, levels.high_s))
    return (
        f"bimodal-steps: {1 - levels.high_share:.0%} of the steps take {low} "
        f"and {levels.high_share:.0%} {high}; {mean}"
    )


def _sample(times: FloatColumn) -> FloatColumn:
    """Return at most 5,000 random times.

    A regular selection could alias with a period of the steps.
    """
    if len(times) <= MAX_SAMPLE:
        return times
    return times[np.random.default_rng(0).integers(0, len(times), MAX_SAMPLE)]


RUN_LENGTH = 5
RUN_WITHIN = 4
"""Steps out of RUN_LENGTH that must be inside the band at the start of the steady window."""
MIN_STEADY = 5
"""Minimum number of steps. A window with fewer is called short."""
MIN_RELATIVE_HALF_WIDTH = 0.001
"""Minimum half-width of the band relative to its center. Clocks and logs are not finer."""
FASTER_STEPS = 3
"""Number of excluded steps below the band from which on they count as another level, not as
warm-up."""
DRIFT_LIMIT = 0.01
"""Relative change over the window above which it is called drifting."""

Rows = slice | npt.NDArray[np.int64]
BATCH_SIZES = ("global_batch", "seq_len")

_SKIP = re.compile(r"skip:(\d{1,9})")
_RANGE = re.compile(r"(\d{1,12}):(\d{1,12})")


class NoStepError(ValueError):
    """Error for a valid rule that selects no step of a log."""


@dataclass(frozen=True)
class Window:
    """Selected rows of a step table, and the record that accompanies every figure."""

    rows: Rows
    record: WindowRecord


def choose_window(steps: Steps, rule: str = "auto", resolution_s: float = 0.0) -> Window:
    """Return the window of a rule.

    Rules are `auto`, `last` (one step), `35:44` (step numbers as printed, inclusive) and `skip:5`
    (all but the first five timed steps). Raises ValueError for other rules, and NoStepError if the
    rule selects no step.
    """
    if rule == "auto":
        return steady_window(steps, resolution_s)
    has_time = np.isfinite(steps["step_time_s"])
    rows = np.flatnonzero(has_time)
    n_timed = len(rows)
    rows = _last_of_each(steps.index, rows[_selected_steps(steps.index[rows], rule)])
    if len(rows) == 0:
        raise NoStepError(
            "excludes the only timed step"
            if n_timed == 1
            else f"selects none of the {n_timed:,} timed steps"
        )
    skipped = int(has_time[: rows[0]].sum())
    state = "steady" if len(rows) >= MIN_STEADY else "short"
    if two_levels(steps["step_time_s"][rows], resolution_s):
        state = "uneven"
    record = _record(steps, rows, skipped, state, None, None)
    shift = _shift_inside(steps, rows) if state == "steady" else None
    return Window(rows, record.model_copy(update={"rule": rule, "shift": shift}))


def check_rule(rule: str) -> None:
    """Raise ValueError if `rule` is not a rule for a window."""
    if rule != "auto":
        _selected_steps(np.empty(0, dtype=np.int64), rule)


def stretch_around(steps: Steps, rows: Rows) -> slice:
    """Return all rows around a window with ascending step numbers: one attempt of one run."""
    at = np.arange(len(steps))[rows]
    back = np.flatnonzero(steps.index[1:] <= steps.index[:-1]) + 1
    first, last = (int(at[0]), int(at[-1])) if len(at) else (0, len(steps) - 1)
    before, after = back[back <= first], back[back > last]
    return slice(int(before[-1]) if len(before) else 0, int(after[0]) if len(after) else len(steps))


def _last_of_each(index: IntColumn, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return `rows` with only the last row of each step number."""
    if bool((index[1:] > index[:-1]).all()):
        return rows
    _, from_behind = np.unique(index[rows][::-1], return_index=True)
    return np.sort(rows[len(rows) - 1 - from_behind])


def _selected_steps(numbers: IntColumn, rule: str) -> npt.NDArray[np.bool_]:
    """Return a mask of the step numbers that an explicit rule selects."""
    if rule == "last":
        return np.arange(len(numbers)) == len(numbers) - 1
    if match := _SKIP.fullmatch(rule):
        return np.arange(len(numbers)) >= int(match[1])
    if match := _RANGE.fullmatch(rule):
        return (numbers >= int(match[1])) & (numbers <= int(match[2]))
    raise ValueError("is not a window rule")


def steady_window(steps: Steps, resolution_s: float = 0.0) -> Window:
    """Return the steady window of the longest stretch with one batch and one sequence length.

    If the steps have no single level, the window is uneven: its mean is usable, its median is not.
    A step number that does not increase (a restart, another run in the same log) also ends a
    stretch. `resolution_s` is the resolution of the log's printed times. Steps without a time are
    excluded.
    """
    stretch = _one_batch_size(steps)
    times = steps["step_time_s"][stretch]
    if len(times) == 0:
        return Window(stretch, _record(steps, stretch, 0, "none", None, None))
    half_width = band_half_width(times, resolution_s)
    warmup = warmup_steps(times, half_width)
    start = int(np.argmax(_inside(times, half_width))) if warmup is None else warmup
    rows = _after(stretch, start)
    if warmup is None or len(times) - warmup < MIN_STEADY:
        state = "short" if len(times) - start < MIN_STEADY else "uneven"
        return Window(rows, _record(steps, rows, start, state, half_width, None))
    more, is_settled = settling_steps(times[warmup:])
    rows = _after(stretch, warmup + more)
    shift = _shift_before(steps.index[stretch], times, warmup, half_width)
    drift, noise = relative_drift(times[warmup + more :])
    fades = not is_settled and drift < 0
    state = "drifting" if fades or abs(drift) > max(DRIFT_LIMIT, 3 * noise) else "steady"
    if state == "steady" and two_levels(times[warmup + more :], resolution_s):
        state = "uneven"
    record = _record(steps, rows, warmup + more, state, half_width, drift)
    if state != "uneven":
        shift = shift or _shift_inside(steps, rows)
    return Window(rows, record.model_copy(update={"shift": shift}))


def _shift_before(
    numbers: IntColumn, times: FloatColumn, warmup: int, half_width: float
) -> LevelShift | None:
    """Return the step change from an excluded faster level; None if there is none.

    Warm-up steps are never faster than later ones, so faster steps belong to another level.
    """
    centre = float(np.median(times[warmup:]))
    faster = times[:warmup][times[:warmup] < centre - half_width]
    if len(faster) < FASTER_STEPS:
        return None
    ratio = centre / float(np.median(faster))
    if ratio - 1 <= MIN_SHIFT:
        return None
    return LevelShift(first_step=int(numbers[warmup]), ratio=ratio, left_out=True)


def _shift_inside(steps: Steps, rows: Rows) -> LevelShift | None:
    """Return the step change inside the window, lasting or temporary; None if there is none."""
    times, numbers = steps["step_time_s"][rows], steps.index[rows]
    shift = level_shift(times) or temporary_level(times)
    if shift is None:
        return None
    last = None if shift.stop is None else int(numbers[shift.stop - 1])
    return LevelShift(first_step=int(numbers[shift.at]), last_step=last, ratio=shift.ratio)


def band_half_width(times: FloatColumn, resolution_s: float = 0.0) -> float:
    """Return the half-width of the steady band in seconds, from the second half of the steps."""
    half = times[len(times) // 2 :]
    centre = float(np.median(half))
    return max(
        3 * NORMAL_MAD * mad_around(half, centre), resolution_s, MIN_RELATIVE_HALF_WIDTH * centre
    )


def warmup_steps(times: FloatColumn, half_width: float) -> int | None:
    """Return the number of steps before the first one in the band; None if there is none.

    At least 4 of the 5 steps from that step on must be in the band.
    """
    inside = _inside(times, half_width)
    starts = len(times) - RUN_LENGTH + 1
    if starts < 1:
        return None
    within = sum(inside[k : k + starts].astype(np.int8) for k in range(RUN_LENGTH))
    steady = inside[:starts] & (within >= RUN_WITHIN)
    return int(np.argmax(steady)) if steady.any() else None


def _inside(times: FloatColumn, half_width: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the times in the band around the second half's median."""
    centre = float(np.median(times[len(times) // 2 :]))
    return (times >= centre - half_width) & (times <= centre + half_width)


def relative_drift(times: FloatColumn) -> tuple[float, float]:
    """Return the relative change of the step time over the window, and its standard error.

    Both are relative to the median. The change is the Theil-Sen slope times the length of the
    window. Its standard error is that of a least-squares slope, sigma sqrt(12 / n), with sigma from
    the MAD of the residuals, and widened for correlated neighbors.
    """
    medians = group_medians(times, 500)
    first, second = np.triu_indices(len(medians), 1)
    slope = float(np.median((medians[second] - medians[first]) / (second - first)))
    centre = float(np.median(medians))
    residuals = medians - slope * np.arange(len(medians))
    sigma = NORMAL_MAD * float(np.median(np.abs(residuals - np.median(residuals)))) / centre
    residual = winsorize(residuals - np.median(residuals))
    widening = correlation_widening(residual, fitted=2)
    return slope * (len(medians) - 1) / centre, sigma * (12 / len(medians)) ** 0.5 * widening


def _one_batch_size(steps: Steps) -> Rows:
    """Return the longest stretch with one batch, one sequence length and ascending step numbers."""
    timed_rows = _timed_rows(steps)
    numbers = steps.index[timed_rows]
    changes = [np.flatnonzero(_differs(steps[name][timed_rows])) + 1 for name in BATCH_SIZES]
    changes.append(np.flatnonzero(numbers[1:] <= numbers[:-1]) + 1)
    bounds = [0, *np.unique(np.concatenate(changes)).tolist(), len(numbers)]
    stretches = list(pairwise(bounds))
    start, stop = max(reversed(stretches), key=lambda bound: bound[1] - bound[0])
    if isinstance(timed_rows, slice):
        return slice(timed_rows.start + start, timed_rows.start + stop)
    return timed_rows[start:stop]


def _timed_rows(steps: Steps) -> Rows:
    """Return the rows with a time, as a slice if they are contiguous, which takes no memory."""
    finite = np.isfinite(steps["step_time_s"])
    if not len(finite):
        return slice(0, 0)
    first, behind = int(finite.argmax()), len(finite) - int(finite[::-1].argmax())
    return slice(first, behind) if finite[first:behind].all() else np.flatnonzero(finite)


def _differs(column: FloatColumn) -> npt.NDArray[np.bool_]:
    """Return a mask of values that differ from their predecessor. NaN after NaN counts as equal."""
    before, after = column[:-1], column[1:]
    return (before != after) & ~(np.isnan(before) & np.isnan(after))


def _after(rows: Rows, start: int) -> Rows:
    """Return `rows` without the first `start` ones."""
    return slice(rows.start + start, rows.stop) if isinstance(rows, slice) else rows[start:]


def _record(
    steps: Steps,
    rows: Rows,
    n_warmup: int,
    state: Literal["steady", "short", "drifting", "uneven", "none"],
    half_width_s: float | None,
    drift: float | None,
) -> WindowRecord:
    numbers = steps.index[rows]
    return WindowRecord(
        rule="auto",
        first_step=int(numbers[0]) if len(numbers) else None,
        last_step=int(numbers[-1]) if len(numbers) else None,
        n=len(numbers),
        n_warmup=n_warmup,
        state=state,
        half_width_s=half_width_s,
        drift=drift,
        global_batch=_only(steps["global_batch"][rows]),
        seq_len=_only(steps["seq_len"][rows]),
    )


def _only(column: FloatColumn) -> int | None:
    return int(column[0]) if len(column) and np.isfinite(column[0]) else None


MIN_TEST_STEPS = 20
"""Minimum number of steps for these tests."""
MIN_SHIFT = 0.01
"""Minimum relative change. Smaller changes do not mean a different state of the machine."""
SHIFT_NOISES = 4.5
"""Standard errors that the best of all possible shifts must exceed. Chance reaches 3.2 in 5% of
cases."""
EPISODE_NOISES = 5.5
"""Standard errors that the best of all windows must exceed."""
SHORTEST_EPISODE_SHARE = 20
"""Minimum length of a temporary level: five steps, and a twentieth of all steps."""
EDGE_SHARE = 0.4
"""Maximum length of a gradual edge, relative to the temporary level."""
MAX_SCANNED_VALUES = 400
"""Maximum number of values in the scan for a temporary level, which takes their square."""
TREND_NOISES = 2.0
"""Standard errors by which the beginning of the window may be slower than its second half."""
MIN_LEVEL_STEPS = 5
LONGEST_LEVEL_SHARE = 50
"""Minimum length of a level: five steps, and a fiftieth of all steps."""
REACH = 4.0
MAX_VALUES = 2000
"""Maximum number of values. Longer series are reduced to medians of equal consecutive groups."""
MAX_CORRELATION = 0.95


@dataclass(frozen=True)
class Shift:
    """A step change: from index `at` on, steps take `ratio` times as long as before.

    With `stop`, the change is temporary: index `stop` is the first one back at the old level.
    """

    at: int
    ratio: float
    stop: int | None = None


def settling_steps(times: FloatColumn) -> tuple[int, bool]:
    """Return the number of initial steps that still belong to a decaying warm-up, and if it ends.

    While the first quarter is slower than the second half by two standard errors, a tenth of the
    steps is excluded. At least a third of the steps and at least 20 remain.
    """
    size, values = _group_medians(times)
    min_remaining = max(MIN_TEST_STEPS, len(values) // 3)
    start = 0
    while True:
        remaining = values[start:]
        if len(remaining) < MIN_TEST_STEPS or not _still_fades(remaining):
            return start * size, True
        step = max(1, len(remaining) // 10)
        if len(remaining) - step < min_remaining:
            return start * size, False
        start += step


def level_shift(times: FloatColumn) -> Shift | None:
    """Return the single lasting step change of more than 1%; None if there is none.

    It is the place that maximizes |m2 - m1| / (s sqrt(1/k + 1/(n - k))), where s is the spread
    around both levels. The levels are medians.
    """
    size, values = _group_medians(times)
    n = len(values)
    if n < MIN_TEST_STEPS:
        return None
    min_steps = max(MIN_LEVEL_STEPS, n // LONGEST_LEVEL_SHARE)
    y = winsorize(values)
    places = np.arange(1, n)
    sums = np.cumsum(y)
    means = sums[:-1] / places, (sums[-1] - sums[:-1]) / (n - places)
    weights = np.sqrt(places * (n - places) / n)
    separation = np.abs(means[1] - means[0]) * weights
    separation[: min_steps - 1] = separation[n - min_steps :] = 0.0
    at = int(np.argmax(separation)) + 1
    before, after = float(np.median(values[:at])), float(np.median(values[at:]))
    # Winsorize around each level. Otherwise the rest of a warm-up looks like correlated noise.
    residual = winsorize(np.concatenate([values[:at] - before, values[at:] - after]))
    error = float(np.std(residual)) * correlation_widening(residual)
    ratio = after / before
    if separation[at - 1] <= SHIFT_NOISES * error or abs(ratio - 1) <= MIN_SHIFT:
        return None
    return Shift(at * size, ratio)


def temporary_level(times: FloatColumn) -> Shift | None:
    """Return the best temporary level that differs by more than 1%; None if there is none.

    It is the window i..j with the largest |m_in - m_out| / (s sqrt(1/k + 1/(n - k))), for k steps
    inside and steps outside at both ends. s is the spread around both levels.
    """
    size = -(-len(times) // MAX_SCANNED_VALUES)
    values = group_medians(times, MAX_SCANNED_VALUES)
    n = len(values)
    if n < MIN_TEST_STEPS:
        return None
    min_steps = max(MIN_LEVEL_STEPS, n // SHORTEST_EPISODE_SHARE)
    y = winsorize(values)
    sums = np.concatenate([[0.0], np.cumsum(y - y.mean())])
    lengths = np.arange(n + 1) - np.arange(n + 1)[:, None]
    is_window = (lengths >= min_steps) & (lengths <= n - 2 * MIN_LEVEL_STEPS)
    is_window[:MIN_LEVEL_STEPS] = False
    is_window[:, n - MIN_LEVEL_STEPS + 1 :] = False
    inside = np.where(is_window, lengths, 1)
    # The sum of all deviations is 0, so the difference of the means is n / (k (n - k)) times that
    # of the window.
    weights = np.sqrt(n / (inside * (n - inside)))
    separation = np.where(is_window, np.abs(sums - sums[:, None]) * weights, 0.0)
    at, stop = np.unravel_index(int(np.argmax(separation)), separation.shape)
    if separation[at, stop] <= 0:
        return None
    mask = np.zeros(n, dtype=np.bool_)
    mask[at:stop] = True
    level, base = float(np.median(values[mask])), float(np.median(values[~mask]))
    deviations = values - np.where(mask, level, base)
    residual, places = winsorize(deviations), np.arange(n)
    # Steps on a gradual edge belong to neither level. Clipped, they look like correlated noise.
    from_edge = np.minimum(np.abs(places - at), np.abs(places - stop))
    residual[(residual != deviations) & (from_edge <= EDGE_SHARE * (stop - at))] = 0.0
    error = float(np.std(residual)) * correlation_widening(residual)
    if separation[at, stop] <= EPISODE_NOISES * error or abs(level / base - 1) <= MIN_SHIFT:
        return None
    return Shift(int(at) * size, level / base, min(int(stop) * size, len(times)))


def winsorize(values: FloatColumn) -> FloatColumn:
    """Return `values` with outliers clipped at four robust standard deviations from the median."""
    centre = float(np.median(values))
    reach = REACH * NORMAL_MAD * mad_around(values, centre)
    return np.clip(values, centre - reach, centre + reach) if reach > 0 else values


def correlation_widening(residual: FloatColumn, fitted: int = 1) -> float:
    """Return the factor by which correlated neighbors widen the error of a mean.

    It is sqrt((1 + rho) / (1 - rho)). rho is the lag-1 autocorrelation, limited to 0 to 0.95 after
    its small-sample bias of (fitted + 3 rho) / n is corrected. For one fitted mean this is
    Kendall's (1 + 3 rho) / n (Biometrika 41 (1954) 403).
    """
    power = float((residual * residual).sum())
    if power <= 0:
        return 1.0
    rho = float((residual[1:] * residual[:-1]).sum()) / power
    if rho > 0:
        rho += (fitted + 3 * rho) / len(residual)
    rho = min(max(rho, 0.0), MAX_CORRELATION)
    return ((1 + rho) / (1 - rho)) ** 0.5


def _still_fades(values: FloatColumn) -> bool:
    y = winsorize(values)
    early, late = y[: len(y) // 4], y[len(y) // 2 :]
    residual = late - late.mean()
    error = float(np.std(residual, ddof=1)) * correlation_widening(residual)
    error *= (1 / len(early) + 1 / len(late)) ** 0.5
    return float(early.mean() - late.mean()) > TREND_NOISES * error


def _group_medians(times: FloatColumn) -> tuple[int, FloatColumn]:
    """Return the number of steps per group, and the medians of the groups."""
    size = -(-len(times) // MAX_VALUES)
    return size, group_medians(times, MAX_VALUES)
