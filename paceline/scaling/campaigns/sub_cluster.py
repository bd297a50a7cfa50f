"""Result of one sub-cluster's run, read from the run folders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paceline.compare.over_time.repeats import has_figure
from paceline.core.node_groups import GroupThroughput, Purpose
from paceline.core.result import Result, Status
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.documents import read_json
from paceline.files.run_folder import RUN_FILE, RunRecord, Trial, read_record, run_folders
from paceline.runs.outcome import evaluate
from paceline.scaling.campaigns.record import Campaign, Group

FIGURE = "samples_per_s"
RoundHosts = tuple[int, Group]
"""Round and hosts of a trial."""


class TrialResult(Value):
    """Result of one sub-cluster in one round."""

    round: PositiveInt
    purpose: Purpose
    nodes: PositiveInt
    devices_per_node: PositiveInt
    hosts: Group
    run: str | None
    """The run's folder; None when there is none."""
    status: Status
    reason: str | None = None
    samples_per_s: float | None = None
    """Samples/s of the whole sub-cluster, at its median step; None when it failed."""
    spread: float | None = None
    """Robust relative spread of the steps."""
    n: NonNegativeInt | None = None
    """Number of steps behind the value."""
    step_time_s: float | None = None
    global_batch: PositiveInt
    started_unix: float | None = None
    ended_unix: float | None = None
    faulty_hosts: Group = ()
    """Hosts that the launcher reports as the cause of a failure."""

    @property
    def place(self) -> RoundHosts:
        """Round and hosts, which identify the trial."""
        return self.round, self.hosts

    @property
    def ok(self) -> bool:
        """True if the trial has a value."""
        return self.samples_per_s is not None


def trial_result(record: RunRecord, result: Result, trial: Trial) -> TrialResult:
    """Return the trial's result from the record of its run."""
    assert record.spec is not None
    metric = result.metrics.get(FIGURE)
    step = result.metrics.get("step_time_s")
    is_measured = has_figure(result) and metric is not None
    unsteady_reason = (
        "the run has no steady step time" if result.status == "ok" and not is_measured else None
    )
    return TrialResult(
        round=trial.round,
        purpose=trial.purpose,
        nodes=len(trial.hosts),
        devices_per_node=record.spec.cluster.devices_per_node,
        hosts=trial.hosts,
        run=record.name,
        status=result.status,
        reason=result.reason or unsteady_reason,
        samples_per_s=metric.value if metric and is_measured else None,
        spread=metric.spread if metric and is_measured else None,
        n=metric.n if metric and is_measured else None,
        step_time_s=step.value if step and is_measured else None,
        global_batch=record.spec.training.global_batch,
        started_unix=record.launched_unix,
        ended_unix=record.ended_unix,
        faulty_hosts=record.faulty_hosts,
    )


def known_trials(root: Path, campaign: Campaign) -> dict[RoundHosts, TrialResult]:
    """Return the stored trials of a scaling test: the latest run of each, preferably with a value.

    A run of another configuration under the test's name does not count.
    """
    trials: dict[RoundHosts, TrialResult] = {}
    for record, folder in sorted(_runs(root, campaign.name), key=lambda run: run[0].created):
        trial = record.trial
        devices = record.spec.cluster.devices_per_node if record.spec else None
        if trial is None or devices not in campaign.devices_per_node:
            continue
        expected = campaign.spec(trial.hosts, devices)
        if record.key != expected.key:
            continue
        result = trial_result(record, evaluate(folder).result, trial)
        if result.ok or not (earlier := trials.get(result.place)) or not earlier.ok:
            trials[result.place] = result
    return trials


def measured(trials: Iterable[TrialResult], whole_node: int) -> list[GroupThroughput]:
    """Return the trials on whole nodes as input of the analysis."""
    return [
        GroupThroughput(trial.hosts, trial.samples_per_s, purpose=trial.purpose)
        for trial in trials
        if trial.devices_per_node == whole_node
    ]


def campaign_runs(root: Path, campaign: str) -> list[Path]:
    """Return the folders of all runs of a scaling test."""
    return [
        folder
        for folder in run_folders(root)
        if (read_json(folder / RUN_FILE).get("trial") or {}).get("campaign") == campaign
    ]


def _runs(root: Path, campaign: str) -> list[tuple[RunRecord, Path]]:
    return [(read_record(folder), folder) for folder in campaign_runs(root, campaign)]
