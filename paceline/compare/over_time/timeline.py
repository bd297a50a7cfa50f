"""The history of one recipe as `paceline history --json` prints it: series, steps and drifts."""

from __future__ import annotations

from paceline.compare.over_time.environment import EnvironmentChange
from paceline.compare.run_variation import RunVariation
from paceline.core.metrics import metric_class
from paceline.core.units import percent
from paceline.core.value import NonNegativeInt, Value


class LevelChange(Value):
    """A step in the series."""

    last_before: str
    """Name of the last run before, and `after` of the first run after."""
    first_after: str
    date_before: str
    date: str
    """When the first run after was made."""
    ratio: float
    """New level over old level."""
    low: float
    high: float
    """95 % interval of the ratio."""
    old_level: float
    new_level: float
    n_before: NonNegativeInt
    n_after: NonNegativeInt
    worse: bool | None
    """None for a metric of which neither way is better."""
    environment: tuple[EnvironmentChange, ...]
    environment_note: str | None = None
    """Why no change of the environment is named, or how near to the step it was seen."""


class SlowDrift(Value):
    """A steady change over the whole series."""

    ratio: float
    """Last over first."""
    low: float
    high: float
    worse: bool | None


class SeriesPoint(Value):
    """One value of the series: a run, or the median of a group of repeats."""

    runs: tuple[str, ...]
    date: str
    value: float
    level: float
    """What the series is here without its scatter."""


class RunSeries(Value):
    """Comparable runs in time order."""

    name: str
    key: str | None
    """Content key of what ran; None for imported logs."""
    n_runs: NonNegativeInt
    points: tuple[SeriesPoint, ...]
    changes: tuple[LevelChange, ...]
    drift: SlowDrift | None
    noise: float | None
    """Relative standard deviation of one value around its level."""
    variation: RunVariation | None = None
    """How far single runs lie apart, on one day and between days; None below five days. What
    `compare` judges few or unmixed runs by."""
    findable: float | None
    """Smallest change at the last `findable_points` values that would be found in 9 of 10 cases."""
    findable_points: NonNegativeInt
    notes: tuple[str, ...] = ()


class History(Value):
    """What `paceline history --json` prints."""

    schema_version: int = 1
    recipe: str
    metric: str
    unit: str
    margin: float
    series: tuple[RunSeries, ...]
    left_out: dict[str, tuple[str, ...]]
    """Runs that are in no series, by the reason."""

    @property
    def slowdowns(self) -> int:
        """Steps and drifts for the worse."""
        directions = [
            c.worse for s in self.series for c in (*s.changes, *([s.drift] if s.drift else []))
        ]
        return sum(worse is True for worse in directions)


def change_text(change: LevelChange | SlowDrift, metric: str) -> str:
    """Return the size in words: `2.1 % slower`; without a better direction `2.1 % higher`."""
    ratio, worse = change.ratio, change.worse
    if worse is None:
        return f"{percent(abs(ratio - 1))} {'higher' if ratio > 1 else 'lower'}"
    words = ("slower", "faster") if metric_class(metric).is_speed else ("worse", "better")
    return f"{percent(abs(ratio - 1))} {words[0] if worse else words[1]}"
