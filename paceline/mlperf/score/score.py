"""A score and what it rests on: runs, windows, energy; which runs are counted.

Source: mlcommons/training_policies, training_rules.adoc."""

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
COUNTED: tuple[RunStatus, ...] = ("success", "failed", "aborted")
"""Runs with these count as runs of the set; a duplicate or an unreadable file is none."""


class ScoredRun(Value):
    """One run: its time by the rules, and what it reached in it."""

    file: str
    status: RunStatus
    reason: str | None = None
    part: Literal["counted", "fastest", "slowest", "outside"] = "outside"
    """Whether the score takes it: the fastest and the slowest of its window are dropped."""
    minutes: float | None = None
    samples_to_target: int | None = None
    initialisation_minutes: float | None = None
    median_samples_per_s: float | None = None
    global_batch: int | None = None
    seeds: tuple[int, ...] = ()
    started_ms: float | None = None
    energy: Energy | None = None
    """From run_start to run_stop, where telemetry lies beside the log."""


class ScoreWindow(Value):
    """Consecutive runs that could be submitted together."""

    files: tuple[str, ...]
    failed: int
    olympic_mean_minutes: float | None
    """None with more failed runs than the rules let be dropped: it counts as infinite."""
    chosen: bool = False


class Score(Value):
    """What `paceline mlperf score` answers."""

    folder: str
    benchmark: str
    system: str | None
    organisation: str | None
    division: str | None
    ruleset: str
    ruleset_from: RulesetOrigin
    official: Literal[False] = False
    label: str = UNOFFICIAL
    status: ScoreStatus
    reason: str | None = None
    runs: tuple[ScoredRun, ...]
    runs_required: int
    windows: tuple[ScoreWindow, ...] = ()
    olympic_mean_minutes: float | None = None
    rcp: Convergence | None = None
    scaling_factor: float | None = None
    score_minutes: float | None = None
    mean_samples_to_target: float | None = None
    """Of all runs that converged; the test takes its own, the olympic mean."""
    median_samples_per_s: float | None = None
    mean_initialisation_minutes: float | None = None
    overall_samples_per_s: float | None = None
    """Samples to target over run time, evaluations included, of the counted runs together."""
    num_devices: int | None = None
    device: str | None = None
    model_flops_per_s_per_device: float | None = None
    model_flops_reason: str | None = None
    """Why they are not known."""
    flops_per_sample: float | None = None
    convention: str | None = None
    mean_energy_j: float | None = None
    """To the target, of the counted runs; their `energy` says of what."""
    warnings: tuple[str, ...] = ()

    @property
    def counted_batch(self) -> int | None:
        """The global batch of the counted runs, None where they have no one batch."""
        batches = {run.global_batch for run in self.runs if run.part == "counted"}
        return batches.pop() if len(batches) == 1 else None


def with_model_flops(score: Score) -> Score:
    """The score with the model FLOP/s of a device, evaluations included, or why there are none."""
    samples_per_s, flops = score.overall_samples_per_s, score.flops_per_sample
    if samples_per_s and flops and score.num_devices:
        rate, reason = samples_per_s * flops / score.num_devices, None
    elif not flops:
        rate, reason = None, f"the FLOPs of a sample of {score.benchmark} are not counted here"
    elif not score.num_devices:
        rate, reason = None, "nothing says how many accelerators it had; --gpus does"
    else:
        rate, reason = None, "no counted run has a rate"
    return score.model_copy(
        update={"model_flops_per_s_per_device": rate, "model_flops_reason": reason}
    )


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
