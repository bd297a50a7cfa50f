"""Runner of a scaling test: the planned rounds, and those that the analysis requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import median
from typing import Any, ClassVar, NamedTuple

from paceline.core.errors import PacelineError
from paceline.core.layout_checks import layout_problems
from paceline.engines import engine
from paceline.files.run_folder import Trial, read_record
from paceline.machines.node.binding import with_binding
from paceline.machines.probe.inventory import inventory
from paceline.runs.plan import Plan
from paceline.runs.tasks.runner import TaskQueue, TaskRun, TaskRunner
from paceline.runs.tasks.slot import (
    MAX_SLOTS,
    JobSlot,
    TaskOutcome,
    allocation_fault,
    numbered_slots,
)
from paceline.scaling.analysis.analysis import AnalysisContext, analyse, next_groups
from paceline.scaling.campaigns.record import (
    Campaign,
    Group,
    PlannedRound,
    RoundHosts,
    TrialResult,
    known_trials,
    measured,
    trial_result,
    write_campaign,
)


def with_follow_up(
    campaign: Campaign,
    trials: Mapping[RoundHosts, TrialResult],
    max_rounds: int,
    context: AnalysisContext,
) -> Campaign | None:
    """Return the scaling test with the next rounds that the analysis requests, or None.

    `most` is the maximum number of such rounds, including those of earlier calls. Sub-clusters on
    which the layout cannot run are left out.
    """
    measured_groups = measured(trials.values(), campaign.whole_node)
    follow_ups = [round_ for round_ in campaign.plan if round_.purpose != "plan"]
    budget = max_rounds - len(follow_ups)
    if budget <= 0 or not any(group.samples_per_s for group in measured_groups):
        return None
    planned_groups = {group for round_ in follow_ups for group in round_.groups}
    step = next_groups(
        analyse(measured_groups, replace(context, scaling=campaign.scaling)), planned_groups
    )
    if step is None:
        return None
    purpose, rounds = step
    new_rounds: list[PlannedRound] = []
    for groups in rounds:
        for nodes in sorted({len(hosts) for hosts in groups}):
            alike = tuple(g for g in groups if len(g) == nodes and can_run(campaign, g))
            if alike and len(new_rounds) < budget:
                new_rounds.append(
                    PlannedRound(
                        number=len(campaign.plan) + len(new_rounds) + 1,
                        purpose=purpose,
                        nodes=nodes,
                        devices_per_node=campaign.whole_node,
                        groups=alike,
                    )
                )
    if not new_rounds:
        return None
    return campaign.model_copy(update={"plan": (*campaign.plan, *new_rounds)})


def can_run(campaign: Campaign, hosts: Group) -> bool:
    """Return whether the layout fits this many nodes."""
    return not layout_problems(campaign.spec(hosts, campaign.whole_node).parallel)


MAX_PARALLEL = MAX_SLOTS
"""Default maximum number of sub-clusters that run at the same time."""
EXTRA_ROUNDS = 8
"""Default maximum number of follow-up rounds for suspect nodes."""
HOST_FAULTS = ("failed", "oom", "timeout", "nan")
"""Statuses after which a host that ran alone counts as bad; a run that was too noisy does not."""


@dataclass(frozen=True)
class Remaining:
    """Remaining part of a scaling test."""

    trials: int
    """Number of sub-clusters, including those that are running."""
    rounds: int
    seconds: float | None
    """Remaining time, if runs take as long as so far; None before the first has ended."""


class SubCluster(NamedTuple):
    """Some hosts in one round."""

    round: PlannedRound
    hosts: Group


class SubClusterEnd(NamedTuple):
    """Result of a sub-cluster, with a value or a cause of failure, and the remaining part."""

    result: TrialResult
    remaining: Remaining


@dataclass(frozen=True)
class Limits:
    """Maximum number of parallel sub-clusters, and of follow-up rounds."""

    max_parallel: int = MAX_PARALLEL
    extra_rounds: int = EXTRA_ROUNDS


@dataclass
class CampaignRunner(TaskRunner[SubCluster, SubClusterEnd]):
    """A running scaling test. It excludes faulty hosts after each round."""

    campaign: Campaign = field(kw_only=True)
    round_begins: Callable[[PlannedRound, Sequence[Group], Remaining], None] = field(kw_only=True)
    """Callback with the sub-clusters that run next."""
    limits: Limits = field(default_factory=Limits)
    context: AnalysisContext = field(default_factory=AnalysisContext)
    trials: dict[RoundHosts, TrialResult] = field(default_factory=dict[RoundHosts, TrialResult])
    excluded_hosts: dict[str, str] = field(default_factory=dict[str, str])
    """Hosts that are excluded from later rounds, with the reason."""
    unplaced_hosts: dict[int, Group] = field(default_factory=dict[int, Group])
    """Hosts by round that lost their partners and could not be placed."""
    faults: ClassVar[type[PacelineError]] = PacelineError
    _attempts: set[RoundHosts] = field(default_factory=set[RoundHosts])
    _seconds: list[float] = field(default_factory=list[float])
    _inventory: dict[str, Any] = field(default_factory=dict[str, Any])

    def run(self) -> None:
        """Run every incomplete round, then the follow-up rounds for suspect nodes."""
        self.trials = known_trials(self.root, self.campaign)
        at = 0
        while not self.stop.is_set() and self.stop_reason is None:
            if at == len(self.campaign.plan):
                more = with_follow_up(
                    self.campaign, self.trials, self.limits.extra_rounds, self.context
                )
                if more is None:
                    return
                write_campaign(self.root, more)
                self.campaign = more
            self._run_round(self.campaign.plan[at])
            at += 1

    def missing(self, round: PlannedRound) -> list[Group]:
        """Return the sub-clusters of a round that have no value and were not tried in this run."""
        return [
            hosts
            for hosts in self._groups(round)
            if (round.number, hosts) not in self._attempts and not self._has_value(round, hosts)
        ]

    def _run_round(self, round: PlannedRound) -> None:
        """Run the missing part of a round; when a host is lost, regroup and run its partners."""
        while (
            not self.stop.is_set() and self.stop_reason is None and (groups := self.missing(round))
        ):
            self.round_begins(round, groups, self._remaining(round))
            self.slots = numbered_slots(min(self.limits.max_parallel, len(groups)))
            self._inventory = inventory()
            self.run_tasks(TaskQueue(SubCluster(round, hosts) for hosts in groups))
            if not self.stop.is_set():
                self._exclude_faulty_hosts(round)

    def run_of(self, task: SubCluster, slot: JobSlot) -> TaskRun:
        """Return the run of a sub-cluster, which uses its own hosts whatever the slot."""
        round, hosts = task
        spec = self.campaign.spec(hosts, round.devices_per_node)
        name = f"{self.campaign.name}-{round.number}-{hosts[0]}"
        plan = Plan(spec, with_binding(engine(spec.engine).job(spec, name)), self._inventory)
        group = self.campaign.group_name(len(hosts), round.devices_per_node)
        return TaskRun(plan, group, trial=self._trial(task))

    def keep(self, task: SubCluster, outcome: TaskOutcome, moved: bool) -> SubClusterEnd:
        """Record a sub-cluster's value or cause of failure."""
        if isinstance(outcome, PacelineError):
            result = self._without_run(task, outcome)
        else:
            record = read_record(self.root / outcome.run)
            result = trial_result(record, outcome, self._trial(task))
        self.trials[result.place] = result
        self._attempts.add(result.place)
        if result.started_unix and result.ended_unix:
            self._seconds.append(result.ended_unix - result.started_unix)
        return SubClusterEnd(result, self._remaining(task.round))

    def _trial(self, task: SubCluster) -> Trial:
        round, hosts = task
        return Trial(
            campaign=self.campaign.name, round=round.number, purpose=round.purpose, hosts=hosts
        )

    def _exclude_faulty_hosts(self, round: PlannedRound) -> None:
        """Exclude hosts that failed, and stop if nothing works."""
        of_round = [t for t in self.trials.values() if t.round == round.number]
        failed = sorted((t for t in of_round if not t.ok), key=attrgetter("hosts"))
        if not failed:
            return
        cause = failed[0].reason or failed[0].status
        # In a round in which others had a value, a host whose single-node run failed counts as bad.
        alone = round.nodes == 1 and len(failed) < len(of_round)
        faulty_hosts = {
            host: trial.reason or trial.status
            for trial in failed
            for host in trial.faulty_hosts
            or (trial.hosts if alone and trial.status in HOST_FAULTS else ())
            if host in self.campaign.hosts and host not in self.excluded_hosts
        }
        if fault := allocation_fault(self.campaign.points[0].spec.cluster):
            self.stop_reason = fault
        elif len(faulty_hosts) + len(self.excluded_hosts) == len(self.campaign.hosts) > 1:
            self.stop_reason = f"every host failed, so this machine may be at fault: {cause}"
        elif not any(trial.ok for trial in self.trials.values()):
            self.stop_reason = f"no sub-cluster of the first round has a value: {cause}"
        else:
            self.excluded_hosts |= faulty_hosts
            for host, why in faulty_hosts.items():
                self.observer.slot_lost(JobSlot(1, (host,)), why, True)

    def _groups(self, round: PlannedRound) -> list[Group]:
        """Return the sub-clusters of a round; those with a lost host are regrouped without it."""
        whole = [
            g
            for g in round.groups
            if self._has_value(round, g) or not self.excluded_hosts.keys() & set(g)
        ]
        if len(whole) == len(round.groups) or round.purpose != "plan":
            return whole
        used = {host for g in whole for host in g}
        members = [host for g in round.groups for host in g] + list(round.left_over)
        pool = [host for host in members if host not in used and host not in self.excluded_hosts]
        end = len(pool) // round.nodes * round.nodes
        self.unplaced_hosts[round.number] = tuple(pool[end:])
        return [*whole, *(tuple(pool[at : at + round.nodes]) for at in range(0, end, round.nodes))]

    def _has_value(self, round: PlannedRound, hosts: Group) -> bool:
        trial = self.trials.get((round.number, hosts))
        return trial is not None and trial.ok

    def _remaining(self, now: PlannedRound) -> Remaining:
        """Return the remaining part, from the round `now` on."""
        rounds = [round for round in self.campaign.plan if round.number >= now.number]
        open_rounds = [n for round in rounds if (n := len(self.missing(round)))]
        turns = sum(-(-n // self.limits.max_parallel) for n in open_rounds)
        seconds = turns * median(self._seconds) if self._seconds else None
        return Remaining(sum(open_rounds), len(open_rounds), seconds)

    def _without_run(self, task: SubCluster, fault: PacelineError) -> TrialResult:
        """Return the result for hosts where no run could start, or the folder was not writable."""
        spec = self.campaign.spec(task.hosts, task.round.devices_per_node)
        return TrialResult(
            round=task.round.number,
            purpose=task.round.purpose,
            nodes=len(task.hosts),
            devices_per_node=spec.cluster.devices_per_node,
            hosts=task.hosts,
            run=None,
            status="failed",
            reason=str(fault),
            global_batch=spec.training.global_batch,
            ended_unix=time.time(),
            faulty_hosts=fault.hosts,
        )
