"""The two sides of a comparison: runs (or a published row) with what is known of each."""

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
from paceline.core.units import counted

LAST_STEPS = (LAST_STEP, "last step")
"""How a run and a published table say that the last step alone is their figure."""
OUTLYING_RANGES = 5
"""An outlier is a repeat further from the others than this many of their ranges."""


@dataclass(frozen=True)
class ComparedRun:
    """One run as a comparison sees it."""

    name: str
    status: Status
    facts: RunSettings
    metrics: Mapping[str, Metric]
    reason: str | None = None
    window: WindowRecord | None = None
    printed_step_s: float = 0.0
    """Step of the printed step times; 0 when they are not rounded."""
    created: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    place: str = ""
    """Its folder, where it has one."""

    @property
    def identity(self) -> str:
        """What no other run has, even if it has the same name."""
        return self.place or self.name

    @property
    def averaged(self) -> bool:
        """True when the source prints one average instead of steps."""
        return self.window is not None and self.window.rule == AS_PRINTED

    @property
    def last_step_only(self) -> bool:
        """True when the last step alone is the figure, by a rule that was asked for."""
        return self.window is not None and self.window.rule in LAST_STEPS

    @property
    def steps_used(self) -> str | None:
        """Which steps the figure stands for, in words; None = nobody said."""
        if self.window is None:
            return None
        return "the last step" if self.last_step_only else "many steps"

    @property
    def usable(self) -> bool:
        """True when the run ended well and has figures from enough steady steps."""
        possible = impossible_figure(self.metrics) is None
        return self.status == "ok" and bool(self.metrics) and self._settled and possible

    @property
    def _settled(self) -> bool:
        return self.window is None or self.window.supports_verdict

    @property
    def why_not(self) -> str:
        """Why it is left out."""
        few = "" if self._settled else "too few steady steps"
        impossible = impossible_figure(self.metrics)
        return f"{self.name}: {self.reason or few or impossible or self.status}"

    @property
    def resolution(self) -> float:
        """Half a printed step over the step time."""
        step_time_s = finite_value(self.metrics.get("step_time_s"))
        return self.printed_step_s / 2 / step_time_s if step_time_s else 0.0


@dataclass(frozen=True)
class ComparisonSide:
    """A run, repeats of one run, or one published row."""

    name: str
    members: tuple[ComparedRun, ...]
    published: bool = False
    resolution: float = 0.0
    """Of a published figure: half its last printed digit, relative."""
    source: str | None = None

    @property
    def valid_runs(self) -> tuple[ComparedRun, ...]:
        """The members with a trustworthy figure."""
        return tuple(member for member in self.members if member.usable)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The other members, each with the reason."""
        return tuple(member.why_not for member in self.members if not member.usable)

    @property
    def invalid(self) -> str | None:
        """Why the side gives no figure: nothing is left, or too little of a set with failures."""
        valid_runs, left_out = self.valid_runs, self.left_out
        if not valid_runs:
            return f"{self.name} has no valid figure ({'; '.join(left_out[:3]) or 'no runs'})"
        if left_out and len(valid_runs) < MIN_REPEATS:
            return (
                f"{self.name} has no valid figure from {len(left_out):,} of "
                f"{counted(len(self.members), 'run')} ({'; '.join(left_out[:3])}); "
                f"{MIN_REPEATS} good ones would be enough"
            )
        return None

    @property
    def averaged(self) -> bool:
        """True when some figure is an average as its source prints it."""
        return any(member.averaged for member in self.valid_runs)

    @property
    def rounding(self) -> float:
        """How far print may be from the figure, relative."""
        return max([self.resolution, *(member.resolution for member in self.valid_runs)])

    def metric(self, name: str) -> list[Metric | None]:
        """One metric of every used member."""
        return [member.metrics.get(name) for member in self.valid_runs]

    def figures(self, name: str, averaged: bool) -> list[float | None]:
        """One value of every used member; `averaged` asks for the mean step's where it is known."""
        return [metric_value(m, name, averaged and not m.averaged) for m in self.valid_runs]

    def within_run_error(self, name: str) -> float:
        """Standard error of the side's log value as far as the runs themselves tell it.

        From the intervals within the runs, and from two repeats' distance if that is larger.
        """
        values = [(m.value, m.low, m.high) for m in self.metric(name) if m]
        # A 95 % interval is 2 x 1.96 standard errors wide.
        errors = [
            log(high / low) / (2 * 1.96)
            for _, low, high in values
            if low and high and 0 < low <= high
        ]
        within = sum(error**2 for error in errors) ** 0.5 / max(1, len(values))
        positive = [value for value, *_ in values if value and value > 0]
        # Two logarithms at distance d: s = d / sqrt 2, their mean's error s / sqrt 2 = d / 2.
        between = abs(log(positive[0] / positive[1])) / 2 if len(positive) == 2 else 0.0
        return max(within, between)


@dataclass(frozen=True)
class Pair:
    """The side that is the measure and the side that is judged."""

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
        """Runs used of each side of which repeats can be made."""
        return [len(side.valid_runs) for side in self.each if not side.published]

    @property
    def not_interleaved(self) -> bool:
        """Whether all runs of one side came before all of the other, from three runs a side on.

        Logs were made at another time than they were imported, which tells nothing.
        """
        times = [
            [m.created for m in side.valid_runs if m.created and m.facts.origin != "imported"]
            for side in self.each
        ]
        if min(map(len, times)) < MIN_REPEATS:
            return False
        return max(times[0]) < min(times[1]) or max(times[1]) < min(times[0])

    @property
    def n_a_and_b(self) -> tuple[int, int]:
        """Runs of the first and second name on the command line."""
        baseline, candidate = len(self.baseline.valid_runs), len(self.candidate.valid_runs)
        return (candidate, baseline) if self.baseline.published else (baseline, candidate)


def metric_value(member: ComparedRun, name: str, at_mean: bool) -> float | None:
    """A metric of a run; `at_mean` gives what it is at the mean step instead of the median one."""
    value = finite_value(member.metrics.get(name))
    if not at_mean or value is None or member.metrics[name].statistic == "at the mean step":
        return value
    if name == "step_time_s":
        return finite_value(member.metrics.get("step_time_mean_s"))
    if metric_class(name) is not RATE:
        return value
    # jitter_tax is the mean step over the median one, less 1.
    tax = finite_value(member.metrics.get("jitter_overhead"))
    return None if tax is None or tax <= -1 else value / (1 + tax)


def outlier_sentences(names: Sequence[str], values: Sequence[float], margin: float) -> list[str]:
    """Sentences about repeats that lie far from all others of their side, from three repeats on.

    Far is more than the margin and five ranges of the others from their median.
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
                f"{names[at]} lies {100 * abs(distance):.1f}% "
                f"{'above' if distance > 0 else 'below'} its other repeats"
            )
    return sentences
