"""Which runs of a set are submitted, which of those are dropped, and the mean of the rest.

Source: mlcommons/training_policies, training_rules.adoc.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from paceline.mlperf.score.convergence import olympic_mean
from paceline.mlperf.score.score import ScoredRun, ScoreWindow

MOST_FAILED = 1
"""Runs of a window that may fail: one is dropped as the slowest."""


def windows_of(runs: Sequence[ScoredRun], num_runs: int) -> list[ScoreWindow]:
    """Every `num_runs` consecutive runs in the order of their start, the submitted one chosen.

    With more runs than needed the rules take the median of all windows, failed ones as infinite. Of
    an even number it is here the slower of the two in the middle.
    """
    ordered = sorted(runs, key=_start)
    windows = [_window(ordered[at : at + num_runs]) for at in range(len(ordered) - num_runs + 1)]
    if not windows:
        return []
    by_time = sorted(range(len(windows)), key=lambda at: _window_minutes(windows[at]))
    middle = by_time[len(windows) // 2]
    windows[middle] = windows[middle].model_copy(update={"chosen": True})
    return windows


def olympic_mean_minutes(runs: Sequence[ScoredRun]) -> float | None:
    """Mean run time without the fastest and the slowest, None with more than one failed run."""
    times = [_minutes(run) for run in runs]
    if sum(not isfinite(time) for time in times) > MOST_FAILED:
        return None
    return olympic_mean(times)


def with_parts(runs: Sequence[ScoredRun], files: Sequence[str]) -> list[ScoredRun]:
    """The runs, of which those in `files` are counted but for the fastest and the slowest."""
    inside = sorted((run for run in runs if run.file in files), key=_minutes)
    parts = dict.fromkeys((run.file for run in inside), "counted")
    if inside:
        parts |= {inside[0].file: "fastest", inside[-1].file: "slowest"}
    return [run.model_copy(update={"part": parts.get(run.file, "outside")}) for run in runs]


def samples_for_the_test(runs: Sequence[ScoredRun]) -> list[float]:
    """Samples to the target of each run, infinite for one that did not reach it."""
    return [
        float(run.samples_to_target) if run.status == "success" and run.samples_to_target else inf
        for run in runs
    ]


def _window(runs: Sequence[ScoredRun]) -> ScoreWindow:
    return ScoreWindow(
        files=tuple(run.file for run in runs),
        failed=sum(run.status != "success" for run in runs),
        olympic_mean_minutes=olympic_mean_minutes(runs),
    )


def _window_minutes(window: ScoreWindow) -> float:
    mean = window.olympic_mean_minutes
    return inf if mean is None else mean


def _minutes(run: ScoredRun) -> float:
    """The run's time, infinite for one that did not converge."""
    return run.minutes if run.status == "success" and run.minutes is not None else inf


def _start(run: ScoredRun) -> float:
    return inf if run.started_ms is None else run.started_ms
