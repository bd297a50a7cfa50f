"""Group of repeats of one configuration: its settings, figures and run-to-run variation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from pydantic import BaseModel

from paceline.compare.judgement import Comparison
from paceline.compare.significance import student_t
from paceline.core.result import Metric, Result, finite_value
from paceline.core.value import NonNegativeInt, PositiveInt, Value

MIN_RUNS_FOR_INTERVAL = 3

MAX_LOG_DEVIATION = 0.5
"""Standard deviation of logarithms above which an interval on them is too wide to be useful."""

RUN_TO_RUN = "run-to-run 95%, Student's t on the logarithms of the runs' values"


PLAIN = "run-to-run 95%, Student's t on the runs' values"


class GroupResult(Value):
    """One group of repeats: its runs and their combined figures."""

    schema_version: int = 1
    group: str
    recipe: str
    changes: tuple[str, ...] = ()
    """Changes of the configuration from the recipe."""
    key: str | None
    num_repeats: PositiveInt
    ok: NonNegativeInt
    """Number of runs with a figure; the group's figures come from these."""
    failed: NonNegativeInt
    """Number of runs that ended otherwise."""
    figures: dict[str, Metric] = {}
    """Figures by metric: `value` is the median of the runs' values, `n` the number of runs,
    `spread` the relative standard deviation between runs (needs two runs), `low` and `high` the
    interval (needs three runs)."""
    runs: tuple[Result, ...] = ()
    faults: tuple[str, ...] = ()
    """Repeats that produced no run, one sentence each."""

    @property
    def missing(self) -> int:
        """Number of repeats that are still missing."""
        return max(0, self.num_repeats - self.ok)


class SeriesResult(Value):
    """Output of `paceline run --repeat --json`: one group, or two interleaved groups."""

    schema_version: int = 1
    groups: tuple[GroupResult, ...]
    interrupted: bool = False
    compare: str | None = None
    """The command that compares the groups."""
    verdict: Comparison | None = None
    """Comparison of two complete groups; the same as that command's output."""
    resume: str | None = None
    """The command that adds the missing repeats; None when none is missing."""


def has_figure(result: Result) -> bool:
    """Return whether a run counts as a repeat: it succeeded and has a step time."""
    return result.status == "ok" and finite_value(result.metrics.get("step_time_s")) is not None


def group_figures(results: Sequence[Result]) -> dict[str, Metric]:
    """Return every metric of the runs that count as repeats, combined over these runs."""
    repeats = [result for result in results if has_figure(result)]
    names = dict.fromkeys(name for result in repeats for name in result.metrics)
    return {name: _over_runs([result.metrics.get(name) for result in repeats]) for name in names}


def _over_runs(metrics: Sequence[Metric | None]) -> Metric:
    present = [metric for metric in metrics if metric is not None]
    values = [value for metric in present if (value := finite_value(metric)) is not None]
    first = present[0]
    if not values:
        return first.model_copy(update={"n": 0})
    spread = low = high = None
    logs = np.log(values) if min(values) > 0 else np.zeros(0)
    deviation = float(logs.std(ddof=1)) if len(logs) > 1 else 0.0
    plain = deviation > MAX_LOG_DEVIATION
    if plain:
        # Shares near zero, such as the jitter overhead, vary by powers of ten: use plain values.
        deviation = float(np.std(values, ddof=1))
        spread = deviation / float(np.mean(values))
        if len(values) >= MIN_RUNS_FOR_INTERVAL:
            reach = student_t(0.975, len(values) - 1) * deviation / len(values) ** 0.5
            low, high = (float(np.mean(values)) + side * reach for side in (-1, 1))
    elif len(logs) > 1:
        spread = float(np.expm1(deviation))
        if len(values) >= MIN_RUNS_FOR_INTERVAL:
            # Interval: mean of the logarithms +- t s / sqrt n.
            reach = student_t(0.975, len(values) - 1) * deviation / len(values) ** 0.5
            low, high = (float(np.exp(logs.mean() + side * reach)) for side in (-1, 1))
    return Metric(
        value=float(np.median(values)),
        unit=first.unit,
        n=len(values),
        spread=spread,
        low=low,
        high=high,
        interval=(PLAIN if plain else RUN_TO_RUN) if low is not None else None,
        statistic="median of runs",
        convention=first.convention,
    )


IGNORED_SETTINGS = ("cluster.name", "cluster.device_memory_bytes", "references")
"""Parts of a RunSpec that do not affect what runs."""


def flat_settings(value: BaseModel) -> dict[str, str]:
    """Return every setting by its dotted name, as text: `layout.zero_stage` -> `3`."""
    return dict(_flat(value.model_dump(mode="json"), ""))


def distinguishing(settings: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return, for each set of settings, those in which the sets differ."""
    names = dict.fromkeys(name for flat in settings for name in flat)
    differing = [
        name
        for name in names
        if len({flat.get(name) for flat in settings}) > 1 and not name.startswith(IGNORED_SETTINGS)
    ]
    return [{name: flat[name] for name in differing if name in flat} for flat in settings]


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, part in cast("dict[str, Any]", value).items():
            yield from _flat(part, f"{path}.{name}" if path else name)
    elif value is not None:
        yield path, str(value).lower() if isinstance(value, bool) else str(value)
