"""History of a recipe's speed over its runs: step changes, and what changed in the environment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from paceline.compare.comparability import compare_settings
from paceline.compare.machine_variation import ConfigurationRuns
from paceline.compare.over_time.environment import (
    EnvironmentChange,
    Items,
    environment_changes,
)
from paceline.compare.over_time.repeats import distinguishing, flat_settings
from paceline.compare.over_time.step_changes import (
    Drift,
    History,
    LevelChange,
    RunSeries,
    SeriesFit,
    SeriesPoint,
    SlowDrift,
    StepChange,
    fit_series,
)
from paceline.compare.significance import MARGIN, RunVariation, estimate_run_variation
from paceline.core.errors import PacelineError, UserError, did_you_mean, unknown_name
from paceline.core.metrics import METRICS, metric_class
from paceline.core.result import Result, finite_value
from paceline.core.run import RunSettings
from paceline.core.stats import printed_step_s
from paceline.core.steps import FloatColumn
from paceline.core.units import percent, pluralize
from paceline.files.recipe import load_recipe, recipe_names
from paceline.files.run_folder import RunRecord, read_record
from paceline.runs.outcome import evaluate
from paceline.runs.run_environment import recorded_environment

MIN_OCCASIONS = 6
"""Minimum number of days for one value per day; with fewer days, each run is a value."""
MIN_RESOLUTION = 0.001
"""Relative rounding of logged values above which a note reports it."""

MAX_SETTINGS = 6
ALWAYS_SHOWN = frozenset({"variant", "device", "device_label", "dtype", "seq_len", "global_batch"})
"""Settings that are part of every series' name."""

UNKNOWN_SETTINGS_NOTE = "{} is unknown; assumed to be the same in all runs"


@dataclass(frozen=True)
class _SeriesRun:
    """Run of a series with its value of the metric."""

    folder: Path
    record: RunRecord
    result: Result
    value: float

    @property
    def is_dated(self) -> bool:
        """False for an imported log without dates: the time of its import says nothing."""
        return self.record.settings.origin != "imported" or bool(self.result.created)

    @property
    def created(self) -> str:
        """Time of the run; of an imported log without dates, the time of its import."""
        return (self.is_dated and self.result.created) or self.record.created

    @property
    def facts(self) -> RunSettings:
        window, facts = self.result.window, self.record.settings
        batch = window.global_batch if window else None
        return facts.model_copy(update={"global_batch": batch}) if batch else facts


@dataclass
class _ComparableRuns:
    """Runs of one series."""

    runs: list[_SeriesRun] = field(default_factory=list[_SeriesRun])
    unknown: tuple[str, ...] = ()

    @property
    def first(self) -> _SeriesRun:
        return self.runs[0]


def recipe_history(
    recipe: str,
    folders: Iterable[Path],
    metric: str = "step_time_s",
    margin: float = MARGIN,
) -> History:
    """Return the history of `metric` over the runs in `folders`, all of one recipe.

    Raises UserError for an unknown metric.
    """
    if metric not in METRICS:
        raise unknown_name(f"--metric {metric}", "is not a metric", metric, METRICS)
    left_out: dict[str, list[str]] = {}
    units: set[str] = set()
    all_series = _group_into_series(_read_runs(folders, metric, units, left_out))
    return History(
        recipe=recipe,
        metric=metric,
        unit=units.pop() if units else "",
        margin=margin,
        series=tuple(
            _series(series, name, metric, margin)
            for series, name in zip(all_series, _names(all_series), strict=True)
        ),
        left_out={reason: tuple(names) for reason, names in left_out.items()},
    )


def runs_around_levels(
    folders: Iterable[Path],
) -> Iterator[tuple[RunSettings, ConfigurationRuns]]:
    """Yield the settings and runs of each configuration, relative to the levels of its history."""
    for series in _group_into_series(_read_runs(folders, "step_time_s", set(), {})):
        points, _ = _values_by_day(series.runs)
        fit = fit_series(_point_values(points))
        days = tuple(map(tuple, _values_of_days(points, fit).values()))
        if days:
            yield series.first.facts, ConfigurationRuns(days, len(fit.levels))


def find_recipe_name(name: str, recipes: Iterable[str]) -> str:
    """Return the recipe name for a name or file; raise UserError if it is not in `recipes`."""
    if name.endswith((".yaml", ".yml")):
        name = load_recipe(name).name
    choices = sorted(set(recipes))
    if name not in choices:
        raise UserError(
            f"recipe {name!r}",
            "has no runs here",
            allowed=", ".join(choices) or None,
            remedy=did_you_mean(name, choices)
            or (f"`paceline run {name}` makes one" if name in recipe_names() else None)
            or "`paceline recipes` lists the recipes",
        )
    return name


def _read_runs(
    folders: Iterable[Path], metric: str, units: set[str], left_out: dict[str, list[str]]
) -> list[_SeriesRun]:
    """Return the runs with a value, the oldest first; add units, and the others by reason."""
    # Importing SQLAlchemy would slow every verb that compares runs.
    from paceline.files.index import KnownResults

    runs: list[_SeriesRun] = []
    result_of = KnownResults(lambda folder: evaluate(folder).result)
    for folder in folders:
        reason, run = _read(folder, metric, units, result_of)
        if run is not None:
            runs.append(run)
        else:
            left_out.setdefault(reason, []).append(folder.name)
    return sorted(runs, key=lambda run: (_created_time(run), run.record.name))


def _read(
    folder: Path, metric: str, units: set[str], result_of: Callable[[Path], Result]
) -> tuple[str, _SeriesRun | None]:
    """Return the run, or the reason why it has no value of the metric."""
    try:
        record = read_record(folder)
        result = result_of(folder)
    except PacelineError as error:
        return str(error), None
    if result.status != "ok":
        return f"ended as {result.status}", None
    if record.settings.profiled:
        return "were profiled", None
    value = finite_value(result.metrics.get(metric))
    if value is None or value <= 0:
        return f"without {metric}" if value is None else f"with {metric} not above 0", None
    units.add(result.metrics[metric].unit)
    return "", _SeriesRun(folder, record, result, value)


def _created_time(run: _SeriesRun) -> datetime:
    try:
        moment = datetime.fromisoformat(run.created)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _group_into_series(runs: Sequence[_SeriesRun]) -> list[_ComparableRuns]:
    """Return series of comparable runs: same key, CPU model, engine and window rule.

    An imported log has no key. It joins a series whose settings are all known and equal, else
    one of imported logs with the same known settings; unknown ones are assumed to be equal.
    """
    by_identity: dict[tuple[str, ...], _ComparableRuns] = {}
    for run in runs:
        if run.record.spec:
            by_identity.setdefault(_identity(run), _ComparableRuns()).runs.append(run)
    imported_series: list[_ComparableRuns] = []
    for run in (run for run in runs if not run.record.spec):
        target = next(
            (s for s in (*by_identity.values(), *imported_series) if _belongs(run, s)), None
        )
        if target is None:
            imported_series.append(target := _ComparableRuns())
            target.unknown = compare_settings([run.facts], [run.facts]).unknown
        target.runs.append(run)
    for series in by_identity.values():
        series.runs.sort(key=lambda run: _created_time(run))
    return sorted([*by_identity.values(), *imported_series], key=lambda s: _created_time(s.first))


def _identity(run: _SeriesRun) -> tuple[str, ...]:
    facts = run.record.settings
    cpu = facts.device_label if facts.device == "cpu" else None
    return (run.record.key or "", cpu or "", *_measurement_method(run))


def _measurement_method(run: _SeriesRun) -> tuple[str, str]:
    """Return the engine and the rule of the steady window."""
    return run.record.settings.engine or "", run.result.window.rule if run.result.window else ""


def _belongs(run: _SeriesRun, series: _ComparableRuns) -> bool:
    if _measurement_method(run) != _measurement_method(series.first):
        return False
    comparison = compare_settings([series.first.facts], [run.facts])
    return not (comparison.differences or comparison.unstated_by_one_side) and (
        not comparison.unknown or series.first.record.spec is None
    )


def _names(all_series: Sequence[_ComparableRuns]) -> list[str]:
    """Return each series' name: its main settings and those that differ from other series."""
    settings = [flat_settings(s.first.record.spec or s.first.facts) for s in all_series]
    differing = distinguishing(settings) if len(all_series) > 1 else [{} for _ in all_series]
    names: list[str] = []
    for series, differing_settings in zip(all_series, differing, strict=True):
        facts = series.first.facts
        label = f" ({facts.device_label})" if facts.device_label else ""
        extra_settings = [
            (k, v)
            for k, v in differing_settings.items()
            if k.rpartition(".")[2] not in ALWAYS_SHOWN
        ]
        parts = [
            facts.variant,
            f"{facts.num_devices or '?'} x {facts.device}{label}" if facts.device else None,
            facts.dtype,
            facts.layout.label(facts.num_devices) if facts.layout and facts.num_devices else None,
            f"seq {facts.seq_len:,}" if facts.seq_len else None,
            f"global batch {facts.global_batch:,}" if facts.global_batch else None,
            *(
                f"{name.rpartition('.')[2]} {value}"
                for name, value in extra_settings[:MAX_SETTINGS]
            ),
        ]
        names.append(" · ".join(part for part in parts if part) or f"{facts.engine} log")
    return names


def _series(comparable: _ComparableRuns, name: str, metric: str, margin: float) -> RunSeries:
    points, notes = _values_by_day(comparable.runs)
    values = _point_values(points)
    imported_values = [run.value for run in comparable.runs if run.record.spec is None]
    resolution = printed_step_s(np.array(imported_values)) / float(np.median(values))
    if resolution > MIN_RESOLUTION:
        notes.append(
            f"the logs round to {percent(resolution, 2)}: smaller changes are not reported"
        )
    fit = fit_series(values, margin + resolution)
    environments = _Environments(points)
    if not all(run.is_dated for run in comparable.runs):
        notes.append("imported logs without dates are dated by their import")
    if comparable.unknown:
        notes.append(UNKNOWN_SETTINGS_NOTE.format(", ".join(comparable.unknown)))
    return RunSeries(
        name=name,
        key=comparable.first.record.key,
        n_runs=len(comparable.runs),
        points=tuple(
            SeriesPoint(
                runs=tuple(run.record.name for run in point),
                date=point[0].created,
                value=float(value),
                level=float(level),
            )
            for point, value, level in zip(points, values, fit.fitted, strict=True)
        ),
        changes=tuple(
            _change(c, points, fit, metric, environments, resolution) for c in fit.changes
        ),
        drift=_slow_drift(fit.drift, metric) if fit.drift else None,
        noise=fit.noise,
        variation=_run_variation(points, fit),
        findable=fit.findable,
        findable_points=fit.findable_runs,
        notes=tuple(notes),
    )


def _values_by_day(runs: Sequence[_SeriesRun]) -> tuple[list[list[_SeriesRun]], list[str]]:
    """Return the runs of each value, and notes about it.

    Runs within an hour do not show how a machine varies from day to day. With enough days, the
    median of each day is one value. The date of an import is not a day of a run.
    """
    by_day: dict[str, list[_SeriesRun]] = {}
    for run in runs:
        key = run.created[:10] if run.is_dated else run.record.name
        by_day.setdefault(key, []).append(run)
    each = [[run] for run in runs]
    if len(by_day) == len(runs):
        return each, []
    if len(by_day) >= MIN_OCCASIONS:
        note = f"{len(by_day)} values: the median of each day's runs is one value"
        return list(by_day.values()), [note]
    days = pluralize(len(by_day), "day")
    why = f"the {len(runs)} runs come from {days}, too few to know the variation between days: "
    return each, [why + "a step change may be that variation"]


def _run_variation(points: Sequence[Sequence[_SeriesRun]], fit: SeriesFit) -> RunVariation | None:
    """Return the variation of runs around the fitted levels, within and between days."""
    days = _values_of_days(points, fit)
    return estimate_run_variation(list(days.values()), [1.0] * len(days), len(fit.levels))


def _values_of_days(
    points: Sequence[Sequence[_SeriesRun]], fit: SeriesFit
) -> dict[str, list[float]]:
    """Return each day's values relative to the fitted levels; imported logs may be of elsewhere."""
    days: dict[str, list[float]] = {}
    for point, level in zip(points, fit.fitted, strict=True):
        for run in (run for run in point if run.facts.origin != "imported"):
            days.setdefault(run.created[:10], []).append(run.value / float(level))
    return days


def _point_values(points: Sequence[Sequence[_SeriesRun]]) -> FloatColumn:
    return np.array([float(np.median([run.value for run in point])) for point in points])


def _change(
    step: StepChange,
    points: list[list[_SeriesRun]],
    fit: SeriesFit,
    metric: str,
    environments: _Environments,
    resolution: float,
) -> LevelChange:
    last, first = points[step.at - 1][-1], points[step.at][0]
    levels = {level.start: level.value for level in fit.levels} | {
        -level.stop: level.value for level in fit.levels
    }
    environment, note = environments.changes_at(step)
    return LevelChange(
        last_before=last.record.name,
        first_after=first.record.name,
        date_before=last.created,
        date=first.created,
        ratio=step.ratio,
        low=step.low / (1 + resolution),
        high=step.high * (1 + resolution),
        old_level=levels[-step.at],
        new_level=levels[step.at],
        n_before=sum(map(len, points[step.at - step.n_before : step.at])),
        n_after=sum(map(len, points[step.at : step.at + step.n_after])),
        worse=_is_worse(metric, step.ratio),
        environment=environment,
        environment_note=note,
    )


def _slow_drift(drift: Drift, metric: str) -> SlowDrift:
    ratio = drift.ratio
    return SlowDrift(ratio=ratio, low=drift.low, high=drift.high, worse=_is_worse(metric, ratio))


def _is_worse(metric: str, ratio: float) -> bool | None:
    direction = metric_class(metric).better
    return None if direction is None else (ratio > 1) == (direction == "lower")


class _Environments:
    """Recorded environments of the runs of a series, read when needed."""

    def __init__(self, points: list[list[_SeriesRun]]) -> None:
        self._points = points
        self._items: dict[int, Items] = {}

    def changes_at(self, step: StepChange) -> tuple[tuple[EnvironmentChange, ...], str | None]:
        """Return what changed at a step change, or one value before or after it, with a note."""
        start, stop = step.at - step.n_before, step.at + step.n_after
        for shift, place in ((0, ""), (-1, "one value earlier"), (1, "one value later")):
            at = step.at + shift
            if not start < at < stop:
                continue
            changes = environment_changes(self._of(start, at), self._of(at, stop))
            relevant = [change for change in changes if change.only_here or not shift]
            if relevant:
                return tuple(relevant), f"seen {place}" if place else None
        sides = self._of(step.at - 1, step.at), self._of(step.at, step.at + 1)
        if not all(_has_machine(side[0]) for side in sides):
            return (), "the environment was not recorded on both sides"
        return (), "no recorded item changed"

    def _of(self, start: int, stop: int) -> list[Items]:
        return [self._at(row) for row in range(start, stop)]

    def _at(self, row: int) -> Items:
        if row not in self._items:
            run = self._points[row][0]
            self._items[row] = recorded_environment(run.folder, run.result)
        return self._items[row]


def _has_machine(items: Items) -> bool:
    return any(not name.startswith("versions.") for name in items)
