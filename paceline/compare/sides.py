"""The two sides of a comparison: runs, or a published row, with their settings and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from statistics import median

from paceline.compare.significance import MIN_REPEATS
from paceline.core.metrics import RATE, metric_class
from paceline.core.result import (
    AS_PRINTED,
    LAST_STEP,
    Metric,
    Status,
    WindowRecord,
    finite_value,
    impossible_figure,
)
from paceline.core.run import RunSettings
from paceline.core.units import pluralize

LAST_STEPS = (LAST_STEP, "last step")
"""Window rules by which a run, or a published table, reports the last step alone."""
OUTLYING_RANGES = 5
"""Distance of an outlier from the other repeats, in ranges of these repeats."""


@dataclass(frozen=True)
class ComparedRun:
    """One run as input of a comparison."""

    name: str
    status: Status
    facts: RunSettings
    metrics: Mapping[str, Metric]
    reason: str | None = None
    window: WindowRecord | None = None
    printed_step_s: float = 0.0
    """Rounding step of the printed step times; 0 when they are not rounded."""
    created: str | None = None
    """Time of the run, or a date in its log; None if unknown."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    hosts: tuple[str, ...] = ()
    """Hosts of the run's ranks; empty if unknown."""
    place: str = ""
    """The run's folder, if it has one."""
    digest: str = ""
    """SHA-256 of the run's log or bundle, the same for all copies."""

    @property
    def identity(self) -> str:
        """Unique identity of the run, also among runs of the same name."""
        return self.digest or self.place or self.name

    @property
    def averaged(self) -> bool:
        """True when the source prints one average instead of steps."""
        return self.window is not None and self.window.rule == AS_PRINTED

    @property
    def last_step_only(self) -> bool:
        """True when the figure is the last step alone, by an explicit rule."""
        return self.window is not None and self.window.rule in LAST_STEPS

    @property
    def steps_used(self) -> str | None:
        """Steps that the figure covers, in words; None if unknown."""
        if self.window is None:
            return None
        return "the last step" if self.last_step_only else "many steps"

    @property
    def usable(self) -> bool:
        """True when the run succeeded and has figures from enough steady steps."""
        possible = impossible_figure(self.metrics) is None
        return self.status == "ok" and bool(self.metrics) and self._settled and possible

    @property
    def _settled(self) -> bool:
        return self.window is None or self.window.supports_verdict

    @property
    def why_not(self) -> str:
        """Reason why the run is excluded."""
        few = "" if self._settled else "too few steady steps"
        impossible = impossible_figure(self.metrics)
        return f"{self.name}: {self.reason or few or impossible or self.status}"

    @property
    def resolution(self) -> float:
        """Half the rounding step divided by the step time."""
        step_time_s = finite_value(self.metrics.get("step_time_s"))
        return self.printed_step_s / 2 / step_time_s if step_time_s else 0.0


@dataclass(frozen=True)
class ComparisonSide:
    """A run, repeats of one run, or one published row."""

    name: str
    members: tuple[ComparedRun, ...]
    published: bool = False
    resolution: float = 0.0
    """Half the last printed digit of a published figure, relative."""
    source: str | None = None

    @property
    def valid_runs(self) -> tuple[ComparedRun, ...]:
        """The members with a valid figure."""
        return tuple(member for member in self.members if member.usable)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The excluded members, each with the reason."""
        return tuple(member.why_not for member in self.members if not member.usable)

    @property
    def invalid(self) -> str | None:
        """Reason why the side has no figure: no valid runs, or too few among failures."""
        valid_runs, left_out = self.valid_runs, self.left_out
        if not valid_runs:
            return f"{self.name} has no valid figure ({'; '.join(left_out[:3]) or 'no runs'})"
        if left_out and len(valid_runs) < MIN_REPEATS:
            return (
                f"{self.name} has no valid figure from {len(left_out):,} of "
                f"{pluralize(len(self.members), 'run')} ({'; '.join(left_out[:3])}); "
                f"{MIN_REPEATS} valid runs would be enough"
            )
        return None

    @property
    def averaged(self) -> bool:
        """True when some figure is an average that its source prints."""
        return any(member.averaged for member in self.valid_runs)

    @property
    def rounding(self) -> float:
        """Largest relative error from rounding in print."""
        return max([self.resolution, *(member.resolution for member in self.valid_runs)])

    def metric(self, name: str) -> list[Metric | None]:
        """Return one metric of every valid run."""
        return [member.metrics.get(name) for member in self.valid_runs]

    def figures(self, name: str, averaged: bool) -> list[float | None]:
        """Return one value of every valid run, at the mean step if `averaged` and known."""
        return [metric_value(m, name, averaged and not m.averaged) for m in self.valid_runs]

    def steps_error(self, name: str) -> float:
        """Return the standard error of the side's log value by the intervals within its runs."""
        values = [(m.low, m.high) for m in self.metric(name) if m]
        # A 95% interval is 2 x 1.96 standard errors wide.
        errors = [
            log(high / low) / (2 * 1.96) for low, high in values if low and high and 0 < low <= high
        ]
        return sum(error**2 for error in errors) ** 0.5 / max(1, len(values))

    def within_run_error(self, name: str) -> float:
        """Return `steps_error`, or that by the distance of two repeats if it is larger."""
        values = [m.value for m in self.metric(name) if m and m.value and m.value > 0]
        # Two logarithms at distance d: s = d / sqrt 2, error of the mean s / sqrt 2 = d / 2.
        between = abs(log(values[0] / values[1])) / 2 if len(values) == 2 else 0.0
        return max(self.steps_error(name), between)


@dataclass(frozen=True)
class Pair:
    """The baseline and the candidate of a comparison."""

    baseline: ComparisonSide
    candidate: ComparisonSide

    @property
    def names(self) -> str:
        """Both names, joined."""
        return f"{self.baseline.name} and {self.candidate.name}"

    @property
    def each(self) -> tuple[ComparisonSide, ComparisonSide]:
        """Baseline and candidate."""
        return self.baseline, self.candidate

    @property
    def sizes(self) -> list[int]:
        """Number of valid runs of each side that can be repeated."""
        return [len(side.valid_runs) for side in self.each if not side.published]

    @property
    def n_a_and_b(self) -> tuple[int, int]:
        """Number of runs of the first and second name on the command line."""
        baseline, candidate = len(self.baseline.valid_runs), len(self.candidate.valid_runs)
        return (candidate, baseline) if self.baseline.published else (baseline, candidate)


def metric_value(member: ComparedRun, name: str, at_mean: bool) -> float | None:
    """Return a metric of a run, at its mean step instead of the median step if `at_mean`."""
    value = finite_value(member.metrics.get(name))
    if not at_mean or value is None or member.metrics[name].statistic == "at the mean step":
        return value
    if name == "step_time_s":
        return finite_value(member.metrics.get("step_time_mean_s"))
    if metric_class(name) is not RATE:
        return value
    # jitter_overhead is the mean step time divided by the median one, minus 1.
    tax = finite_value(member.metrics.get("jitter_overhead"))
    return None if tax is None or tax <= -1 else value / (1 + tax)


def outlier_sentences(names: Sequence[str], values: Sequence[float], margin: float) -> list[str]:
    """Return sentences about repeats far from all others of their side; at least three are needed.

    Far means a distance from the median of the others of more than the margin and five of their
    ranges.
    """
    sentences: list[str] = []
    for at, value in enumerate(values):
        others = [log(v) for v in (*values[:at], *values[at + 1 :])]
        if len(others) < MIN_REPEATS - 1:
            continue
        distance = log(value) - median(others)
        reach = max(margin, OUTLYING_RANGES * (max(others) - min(others)))
        if abs(distance) > reach:
            sentences.append(
                f"{names[at]} is {100 * abs(distance):.1f}% "
                f"{'above' if distance > 0 else 'below'} its other repeats"
            )
    return sentences
