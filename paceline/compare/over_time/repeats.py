"""Repeats of one configuration taken together: what the machine does from run to run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.compare.judgement import Comparison
from paceline.compare.significance import student_t
from paceline.core.result import Metric, Result, finite_value
from paceline.core.value import NonNegativeInt, PositiveInt, Value

FEWEST_FOR_INTERVAL = 3

LARGEST_LOG_DEVIATION = 0.5
"""Beyond this the logarithms of the runs' values make no interval that anybody could use."""

RUN_TO_RUN = "run-to-run 95%, Student's t on the logarithms of the runs' values"


PLAIN = "run-to-run 95%, Student's t on the runs' values"


class GroupResult(Value):
    """One group of repeats: its runs, and what they say together."""

    schema_version: int = 1
    group: str
    recipe: str
    changes: tuple[str, ...] = ()
    """What sets the configuration apart from the recipe as it stands."""
    key: str | None
    num_repeats: PositiveInt
    ok: NonNegativeInt
    """Runs with a figure; the group's figures come from these."""
    failed: NonNegativeInt
    """Runs that ended otherwise."""
    figures: dict[str, Metric] = {}
    """By metric: `value` is the median of the runs' values, `n` the runs, `spread` the standard
    deviation from run to run (relative, from two runs on), `low` and `high` from three runs on."""
    runs: tuple[Result, ...] = ()
    faults: tuple[str, ...] = ()
    """Repeats that left no run, one sentence each."""

    @property
    def missing(self) -> int:
        """Repeats that are still needed."""
        return max(0, self.num_repeats - self.ok)


class SeriesResult(Value):
    """What `paceline run --repeat` prints as JSON: one group, or two that ran in turn."""

    schema_version: int = 1
    groups: tuple[GroupResult, ...]
    interrupted: bool = False
    compare: str | None = None
    """The command that holds the groups against each other."""
    verdict: Comparison | None = None
    """What that command says of two groups that are complete."""
    resume: str | None = None
    """The command that adds the missing repeats; None when none is missing."""


def has_figure(result: Result) -> bool:
    """Whether a run counts as a repeat: it ended well and has a step time."""
    return result.status == "ok" and finite_value(result.metrics.get("step_time_s")) is not None


def group_figures(results: Sequence[Result]) -> dict[str, Metric]:
    """Every metric that some of the runs know, over the runs that count."""
    counted = [result for result in results if has_figure(result)]
    names = dict.fromkeys(name for result in counted for name in result.metrics)
    return {name: _over_runs([result.metrics.get(name) for result in counted]) for name in names}


def _over_runs(metrics: Sequence[Metric | None]) -> Metric:
    present = [metric for metric in metrics if metric is not None]
    values = [value for metric in present if (value := finite_value(metric)) is not None]
    first = present[0]
    if not values:
        return first.model_copy(update={"n": 0})
    spread = low = high = None
    logs = np.log(values) if min(values) > 0 else np.zeros(0)
    deviation = float(logs.std(ddof=1)) if len(logs) > 1 else 0.0
    plain = deviation > LARGEST_LOG_DEVIATION
    if plain:
        # Shares near nothing, as the jitter tax, differ by powers of ten: plain values then.
        deviation = float(np.std(values, ddof=1))
        spread = deviation / float(np.mean(values))
        if len(values) >= FEWEST_FOR_INTERVAL:
            reach = student_t(0.975, len(values) - 1) * deviation / len(values) ** 0.5
            low, high = (float(np.mean(values)) + side * reach for side in (-1, 1))
    elif len(logs) > 1:
        spread = float(np.expm1(deviation))
        if len(values) >= FEWEST_FOR_INTERVAL:
            # t s / sqrt n, both ways from the mean of the logarithms.
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
