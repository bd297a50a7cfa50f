"""Score of a set of runs, and what it is based on: runs, windows, energy.

Source: mlcommons/training_policies, training_rules.adoc.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from typing import Literal

from paceline.core.telemetry import Energy
from paceline.core.value import Value
from paceline.mlperf.rules import UNOFFICIAL, RulesetOrigin
from paceline.mlperf.score.convergence import Convergence, olympic_mean

RunStatus = Literal["success", "failed", "aborted", "duplicate", "unreadable"]
ScoreStatus = Literal["ok", "incomplete", "invalid", "no-reference"]
COUNTED_STATUSES: tuple[RunStatus, ...] = ("success", "failed", "aborted")
"""Statuses that count as runs of the set; duplicates and unreadable files do not."""


class ScoredRun(Value):
    """One run: its time by the rules, and its results."""

    file: str
    status: RunStatus
    reason: str | None = None
    part: Literal["counted", "fastest", "slowest", "outside"] = "outside"
    """Use of the run in the score; the fastest and the slowest of its window are dropped."""
    minutes: float | None = None
    """Run time, run_stop - run_start."""
    samples_to_target: int | None = None
    initialization_minutes: float | None = None
    """Initialization time before run_start, which is not timed."""
    median_samples_per_s: float | None = None
    """Median samples/s during training, evaluations excluded."""
    global_batch: int | None = None
    seeds: tuple[int, ...] = ()
    started_ms: float | None = None
    """Time of run_start, else of init_start, in ms since 1970."""
    energy: Energy | None = None
    """Energy from run_start to run_stop, if telemetry is next to the log."""


class ScoreWindow(Value):
    """Consecutive runs that could be submitted together."""

    files: tuple[str, ...]
    failed: int
    """Number of runs that did not converge."""
    olympic_mean_minutes: float | None
    """Olympic mean of the run times; None (infinite) if more runs failed than may be dropped."""
    chosen: bool = False
    """True for the window that is scored."""


class Score(Value):
    """Output of `paceline mlperf score`."""

    folder: str
    benchmark: str
    system: str | None
    organization: str | None
    division: str | None
    ruleset: str
    ruleset_from: RulesetOrigin
    official: Literal[False] = False
    label: str = UNOFFICIAL
    status: ScoreStatus
    reason: str | None = None
    runs: tuple[ScoredRun, ...]
    runs_required: int
    """Number of runs that the rules require for this benchmark."""
    windows: tuple[ScoreWindow, ...] = ()
    olympic_mean_minutes: float | None = None
    """Mean run time without the fastest and the slowest run."""
    rcp: Convergence | None = None
    """Result of the test against reference convergence points."""
    scaling_factor: float | None = None
    """Factor of the convergence test, 1 or larger."""
    score_minutes: float | None = None
    """Score: olympic mean of the run times x scaling factor."""
    mean_samples_to_target: float | None = None
    """Mean over all runs that converged; the convergence test uses its own olympic mean."""
    median_samples_per_s: float | None = None
    mean_initialization_minutes: float | None = None
    overall_samples_per_s: float | None = None
    """Samples to the target / run time, evaluations included, over all counted runs."""
    num_devices: int | None = None
    device: str | None = None
    model_flops_per_s_per_device: float | None = None
    """Model FLOP/s per device, evaluations included."""
    model_flops_reason: str | None = None
    """Reason why the model FLOP/s are unknown."""
    flops_per_sample: float | None = None
    convention: str | None = None
    """Convention by which the model FLOPs are counted."""
    mean_energy_j: float | None = None
    """Mean energy to the target of the counted runs; each run's `energy` lists its parts."""
    warnings: tuple[str, ...] = ()

    @property
    def counted_batch(self) -> int | None:
        """Global batch of the counted runs; None if they differ."""
        batches = {run.global_batch for run in self.runs if run.part == "counted"}
        return batches.pop() if len(batches) == 1 else None


def with_model_flops(score: Score) -> Score:
    """Return the score with model FLOP/s per device, evaluations included, or why it has none."""
    samples_per_s, flops = score.overall_samples_per_s, score.flops_per_sample
    if samples_per_s and flops and score.num_devices:
        rate, reason = samples_per_s * flops / score.num_devices, None
    elif not flops:
        rate, reason = None, f"FLOPs per sample of {score.benchmark} are unknown"
    elif not score.num_devices:
        rate, reason = None, "unknown number of accelerators; set --gpus"
    else:
        rate, reason = None, "no counted run reports samples/s"
    return score.model_copy(
        update={"model_flops_per_s_per_device": rate, "model_flops_reason": reason}
    )


MAX_FAILED = 1
"""Number of runs in a window that may fail: one is dropped as the slowest."""


def windows_of(runs: Sequence[ScoredRun], num_runs: int) -> list[ScoreWindow]:
    """Return all windows of `num_runs` consecutive runs by start time, with one chosen.

    If there are more runs than needed, the rules take the median of all windows, with failed ones
    as infinite. For an even number this is the slower of the two in the middle.
    """
    by_start = sorted(runs, key=_start)
    windows = [_window(by_start[at : at + num_runs]) for at in range(len(by_start) - num_runs + 1)]
    if not windows:
        return []
    by_time = sorted(range(len(windows)), key=lambda at: _window_minutes(windows[at]))
    middle = by_time[len(windows) // 2]
    windows[middle] = windows[middle].model_copy(update={"chosen": True})
    return windows


def olympic_mean_minutes(runs: Sequence[ScoredRun]) -> float | None:
    """Return the mean run time in minutes without the fastest and the slowest run.

    None if more than one run failed.
    """
    times = [_minutes(run) for run in runs]
    if sum(not isfinite(time) for time in times) > MAX_FAILED:
        return None
    return olympic_mean(times)


def with_parts(runs: Sequence[ScoredRun], files: Sequence[str]) -> list[ScoredRun]:
    """Return all runs; those in `files` are counted, except for the fastest and the slowest."""
    inside = sorted((run for run in runs if run.file in files), key=_minutes)
    parts = dict.fromkeys((run.file for run in inside), "counted")
    if inside:
        parts |= {inside[0].file: "fastest", inside[-1].file: "slowest"}
    return [run.model_copy(update={"part": parts.get(run.file, "outside")}) for run in runs]


def convergence_samples(runs: Sequence[ScoredRun]) -> list[float]:
    """Return samples to the target of each run, infinite for one that did not reach it."""
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
    """Return the run time in minutes, infinite for a run that did not converge."""
    return run.minutes if run.status == "success" and run.minutes is not None else inf


def _start(run: ScoredRun) -> float:
    return inf if run.started_ms is None else run.started_ms
