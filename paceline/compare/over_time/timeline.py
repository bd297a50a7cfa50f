"""History of one recipe, as printed by `paceline history --json`: series, steps and drifts."""

from __future__ import annotations

from paceline.compare.over_time.environment import EnvironmentChange
from paceline.compare.run_variation import RunVariation
from paceline.core.metrics import metric_class
from paceline.core.units import percent
from paceline.core.value import NonNegativeInt, Value


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
    """Output of `paceline history --json`."""

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
