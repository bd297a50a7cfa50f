"""Stored record of a scaling test: campaign.json, and the results of its sub-clusters' runs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Annotated

from pydantic import Field

from paceline.compare.over_time.repeats import has_figure
from paceline.core.errors import SystemFaultError, UserError
from paceline.core.node_groups import GroupThroughput, Purpose, ScalingKind, Split
from paceline.core.result import Result, Status
from paceline.core.run import RunSpec
from paceline.core.units import pluralize
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.documents import read_json, read_value, write_value
from paceline.files.run_folder import RUN_FILE, RunRecord, Trial, read_record, run_folders
from paceline.runs.outcome import evaluate
from paceline.runs.tasks.slot import on_hosts

CAMPAIGN_FILE = "campaign.json"
LOCK_FILE = "lock"

Group = tuple[str, ...]


class CampaignPoint(Value):
    """One size of a scaling test, and the run for it on any hosts."""

    nodes: PositiveInt
    devices_per_node: PositiveInt
    spec: RunSpec


class PlannedRound(Value):
    """Sub-clusters of one size that run at the same time."""

    number: PositiveInt
    purpose: Purpose = "plan"
    nodes: PositiveInt
    devices_per_node: PositiveInt
    repeat: PositiveInt = 1
    groups: tuple[Group, ...]
    left_over: Group = ()
    """Hosts without a place in this round."""
    made_up: bool = False
    """True for an extra round, for hosts that the other rounds left over."""


class Campaign(Value):
    """Contents of campaign.json: the plan of a scaling test, complete before anything starts."""

    schema_version: int = 1
    name: str
    created: str
    command: tuple[str, ...]
    recipe: str
    variant: str | None = None
    scaling: ScalingKind
    hosts: tuple[str, ...]
    sizes: tuple[PositiveInt, ...]
    """Numbers of nodes of a sub-cluster, ascending."""
    devices_per_node: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Numbers of devices used per node, ascending. The last is the whole node, used for all
    sizes."""
    split: Split
    rounds: PositiveInt
    repeats: PositiveInt
    seed: NonNegativeInt
    points: Annotated[tuple[CampaignPoint, ...], Field(min_length=1)]
    plan: tuple[PlannedRound, ...]
    """Rounds in the order in which they run; follow-up rounds for suspect nodes are added at the
    end."""
    notices: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Eight hexadecimal digits that identify the measured workloads and hosts."""
        fields = {
            "hosts",
            "sizes",
            "devices_per_node",
            "split",
            "rounds",
            "repeats",
            "seed",
            "scaling",
        }
        content = self.model_dump(mode="json", include=fields)
        content["points"] = [point.spec.key for point in self.points]
        content["plan"] = [round_.groups for round_ in self.plan if round_.purpose == "plan"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def whole_node(self) -> int:
        """Number of devices of a whole node."""
        return self.devices_per_node[-1]

    def spec(self, hosts: Group, devices: int) -> RunSpec:
        """Return the run for these hosts; without a point of their size, scale its batch.

        Raises UserError for a number of devices per node that no point has.
        """
        points = [p for p in self.points if p.devices_per_node == devices]
        if not points:
            raise UserError(
                f"scaling test {self.name}",
                f"has no runs on {pluralize(devices, 'device')} per node",
                allowed=", ".join(map(str, self.devices_per_node)),
            )
        point = next((p for p in points if p.nodes == len(hosts)), points[-1])
        spec, training = point.spec, point.spec.training
        if point.nodes != len(hosts) and self.scaling == "weak":
            share = Fraction(training.global_batch * len(hosts), point.nodes)
            training = training.model_copy(update={"global_batch": max(1, int(share))})
        return on_hosts(spec.model_copy(update={"training": training}), hosts)

    def group_name(self, nodes: int, devices: int) -> str:
        """Return the name of the group of repeats for runs of this size."""
        return f"{self.name}-{nodes}x{devices}"


def campaign_folders(root: Path) -> list[Path]:
    """Return the folder of every scaling test under `root`, sorted by name."""
    return sorted(path.parent for path in root.glob(f"*/{CAMPAIGN_FILE}"))


def read_campaign(root: Path, name: str) -> Campaign:
    """Return the scaling test with this name or unique name prefix, or the `last` one.

    Raises UserError when there is none.
    """
    folders = campaign_folders(root)
    if name == "last" and folders:
        return max((_read(folder) for folder in folders), key=lambda campaign: campaign.created)
    matches = [f for f in folders if f.name == name] or [
        f for f in folders if f.name.startswith(name)
    ]
    if len(matches) == 1:
        return _read(matches[0])
    names = ", ".join(folder.name for folder in folders[-5:])
    what = f"matches {len(matches)} scaling tests" if matches else f"does not exist in {root}"
    raise UserError(
        f"scaling test {name!r}",
        what,
        allowed=names or None,
        remedy="`paceline scale RECIPE` starts one",
    )


def write_campaign(root: Path, campaign: Campaign) -> None:
    """Write campaign.json."""
    write_value(root / campaign.name / CAMPAIGN_FILE, campaign)


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Lock the scaling test in `folder`; raises UserError when another process has the lock.

    The kernel releases the lock however this process ends.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+")
    except OSError as error:
        raise SystemFaultError(str(folder), f"cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise UserError(
                f"scaling test {folder.name}",
                f"is running in {who}",
                remedy="wait until it ends",
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


def _read(folder: Path) -> Campaign:
    return read_value(folder / CAMPAIGN_FILE, Campaign)


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
