"""Answers of Paceline's public functions to noise, as `paceline parse`, `compare`, `scale` and
`history` would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from _noise_clusters import Cluster, Row
from _noise_runs import RUNS_A_DAY, RunNoise, in_turns
from _noise_steps import StepSeries

from paceline.compare.judge import judge
from paceline.compare.judgement import Comparison
from paceline.compare.sequential.interim_analysis import (
    Design,
    PairsAnalysis,
    analysis_points,
    analyze_at,
)
from paceline.compare.sides import ComparisonSide
from paceline.compare.significance import MARGIN
from paceline.core.node_groups import GroupThroughput
from paceline.core.result import Metric
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from paceline.runs.history import MIN_OCCASIONS
from paceline.scaling.analysis.analysis import Analysis, AnalysisContext, analyse, next_groups
from paceline.scaling.analysis.slow_nodes import HealthySpeed
from tests.compare.members import member

UNFINISHED = "ends without"
"""Start of the warning about an incomplete log; all of these logs are incomplete."""
MAX_FOLLOW_UPS = 40


@dataclass(frozen=True)
class StepAnswer:
    """Step time, interval and warning for one run."""

    error: float
    """Reported over true step time, less 1."""
    covered: bool | None
    """True if the interval contains the truth; None without an interval."""
    warned: bool


def parse_series(series: StepSeries, path: Path) -> StepAnswer:
    """The answer to a log, which is written to `path`."""
    path.write_text("".join(series.lines), encoding="utf-8")
    log = parse_log(path, UserSettings(engine=series.engine)).document
    has_warning = any(not warning.startswith(UNFINISHED) for warning in log.warnings)
    step = log.metrics.get("step_time_s")
    if step is None or step.value is None:
        return StepAnswer(0.0, None, True)
    known_interval = step.low is not None and step.high is not None
    is_covered = (
        (step.low or 0.0) <= series.truth_s <= (step.high or 0.0) if known_interval else None
    )
    return StepAnswer(step.value / series.truth_s - 1, is_covered, has_warning)


def compare_samples(
    values: npt.NDArray[np.float64], candidate: npt.NDArray[np.bool_]
) -> Comparison:
    """The verdict on runs in time order, four a day; `candidate` says whose each is."""
    members = [
        member(
            f"run-{at}",
            metrics={"step_time_s": _step_time(value)},
            created=f"2026-03-{1 + at // RUNS_A_DAY:02d}T{8 + at % RUNS_A_DAY:02d}:00:00+00:00",
        )
        for at, value in enumerate(values)
    ]
    sides = [
        ComparisonSide(
            name, tuple(m for m, of_b in zip(members, candidate, strict=True) if of_b == is_b)
        )
        for name, is_b in (("a", False), ("b", True))
    ]
    return judge(*sides)


def _step_time(value: float) -> Metric:
    reach = 0.0005 * value
    return Metric(value=value, unit="s", n=100, low=value - reach, high=value + reach)


def until_decided(
    noise: RunNoise,
    rng: np.random.Generator,
    change: float,
    most_pairs: int,
    margin: float = MARGIN,
) -> PairsAnalysis:
    """The look at which pairs in turns end."""
    candidate = in_turns(most_pairs)
    values = noise.medians_s(rng, candidate, change)
    sides = values[~candidate].tolist(), values[candidate].tolist()
    design = Design(most_pairs, margin)
    looks = (analyze_at(sides[0][:n], sides[1][:n], design) for n in analysis_points(most_pairs))
    return next(look for look in looks if look.conclusion != "continue")


def by_day(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The series that `paceline runs history` makes of runs: medians of days if enough."""
    days = [values[at : at + RUNS_A_DAY] for at in range(0, len(values), RUNS_A_DAY)]
    return np.array([np.median(day) for day in days]) if len(days) >= MIN_OCCASIONS else values


def analyze_table(cluster: Cluster, repeats: int) -> Analysis:
    """Return the analysis of a table by `paceline scale --from`."""
    return analyse(_groups(cluster.table(repeats)), _context(cluster))


def run_campaign(cluster: Cluster, repeats: int) -> Analysis:
    """The same of a campaign, whose second passes are measured."""
    measured = _groups(cluster.table(repeats))
    analysis = analyse(measured, _context(cluster))
    for _ in range(MAX_FOLLOW_UPS):
        step = next_groups(analysis)
        if step is None:
            break
        purpose, rounds = step
        for groups in rounds:
            rows = [cluster.measured([int(host[5:]) for host in hosts]) for hosts in groups]
            measured += [
                GroupThroughput(hosts, row.samples_per_s, purpose=purpose)
                for hosts, row in zip(groups, rows, strict=True)
            ]
        analysis = analyse(measured, _context(cluster))
    return analysis


def _context(cluster: Cluster) -> AnalysisContext:
    reference = cluster.reference
    return AnalysisContext(
        resolution=10.0**-cluster.decimals,
        reference=None if reference is None else HealthySpeed(reference),
        history={_host(node): values for node, values in cluster.earlier.items()},
    )


def _groups(rows: Sequence[Row]) -> list[GroupThroughput]:
    return [
        GroupThroughput(tuple(map(_host, row.members)), row.samples_per_s or None) for row in rows
    ]


def _host(node: int) -> str:
    return f"node-{node}"
