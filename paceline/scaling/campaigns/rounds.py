"""Runs what is missing of a campaign: the sub-clusters of a round at the same time, each in a thread."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any, Protocol

from paceline.core.errors import PacelineError
from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.files.run_folder import Trial, read_record
from paceline.machines.node.bound_job import bound
from paceline.machines.probe.inventory import inventory
from paceline.runs import flow
from paceline.runs.places.part import MOST_AT_ONCE
from paceline.runs.places.work import allocation_fault
from paceline.runs.plan import Plan
from paceline.scaling.analysis.analysis import Judging
from paceline.scaling.campaigns.follow_up import with_follow_up
from paceline.scaling.campaigns.record import Campaign, Group, PlannedRound, write_campaign
from paceline.scaling.campaigns.sub_cluster import Place, TrialResult, known_trials, trial_result

MAX_PARALLEL = MOST_AT_ONCE
"""Sub-clusters at the same time, unless more are asked for."""
EXTRA_ROUNDS = 8
"""Rounds that may follow a suspicion up."""


BAD = ("failed", "oom", "timeout", "nan")
"""Statuses by which a host that ran alone is taken to be bad; one that was too noisy is not."""


@dataclass(frozen=True)
class Remaining:
    """What is left of a campaign."""

    trials: int
    """Sub-clusters, those that run now among them."""
    rounds: int
    seconds: float | None
    """As long as it will take if runs take as long as so far; None before the first has ended."""


class Observer(Protocol):
    """Who is told how a campaign goes on; its functions are called from several threads."""

    def round_begins(self, one: PlannedRound, groups: Sequence[Group], left: Remaining) -> None:
        """These sub-clusters run now."""
        ...

    def watcher(self, one: PlannedRound, hosts: Group) -> flow.Watcher:
        """Who is told of one run's steps."""
        ...

    def ended(self, result: TrialResult, left: Remaining) -> None:
        """A sub-cluster has ended, with a value or a cause."""
        ...

    def lost(self, host: str, why: str) -> None:
        """A host takes no part in later rounds."""
        ...


@dataclass(frozen=True)
class Limits:
    """How much at once, and how much more than planned."""

    max_parallel: int = MAX_PARALLEL
    extra_rounds: int = EXTRA_ROUNDS


@dataclass
class Running:
    """A campaign that goes on."""

    campaign: Campaign
    root: Path
    command: list[str]
    observer: Observer
    stop: Event
    limits: Limits = field(default_factory=Limits)
    judging: Judging = field(default_factory=Judging)
    tag: str | None = None
    trials: dict[Place, TrialResult] = field(default_factory=dict[Place, TrialResult])
    lost: dict[str, str] = field(default_factory=dict[str, str])
    """Hosts that take no part any more, and why."""
    unplaced: dict[int, Group] = field(default_factory=dict[int, Group])
    """By round, hosts whose partners were lost and who found no others."""
    halted: str | None = None
    """Why nothing more is run although it was not stopped."""
    _tried: set[Place] = field(default_factory=set[Place])
    _seconds: list[float] = field(default_factory=list[float])

    def run(self) -> None:
        """Run every round that lacks something, then those that follow suspicions up."""
        self.trials = known_trials(self.root, self.campaign)
        done = 0
        while not self.stop.is_set() and self.halted is None:
            if done == len(self.campaign.plan):
                more = with_follow_up(
                    self.campaign, self.trials, self.limits.extra_rounds, self.judging
                )
                if more is None:
                    return
                write_campaign(self.root, more)
                self.campaign = more
            self._run_round(self.campaign.plan[done])
            done += 1

    def missing(self, one: PlannedRound) -> list[Group]:
        """Sub-clusters of a round that have no value and were not tried since this began."""
        return [
            hosts
            for hosts in self._groups(one)
            if (one.number, hosts) not in self._tried and not self._has_value(one, hosts)
        ]

    def _run_round(self, one: PlannedRound) -> None:
        """Run what a round lacks; when a host is lost, its partners once more among themselves."""
        while not self.stop.is_set() and self.halted is None and (groups := self.missing(one)):
            self._run_at_once(one, groups)

    def _run_at_once(self, one: PlannedRound, groups: Sequence[Group]) -> None:
        self.observer.round_begins(one, groups, self._remaining(one))
        found = inventory()
        with ThreadPoolExecutor(min(self.limits.max_parallel, len(groups))) as pool:
            try:
                runs = [pool.submit(self._trial, one, hosts, found) for hosts in groups]
                for run in as_completed(runs):
                    self._note(one, run.result())
            except BaseException:  # an interrupt too must let the pool's threads end their runs
                self.stop.set()
                raise
        if not self.stop.is_set():
            self._learn(one)

    def _trial(self, one: PlannedRound, hosts: Group, found: dict[str, Any]) -> TrialResult | None:
        """One sub-cluster's run; None when it was not begun or did not end by itself."""
        if self.stop.is_set():
            return None
        spec = self.campaign.spec(hosts, one.devices_per_node)
        name = f"{self.campaign.name}-{one.number}-{hosts[0]}"
        trial = Trial(
            campaign=self.campaign.name, round=one.number, purpose=one.purpose, hosts=hosts
        )
        try:
            plan = Plan(spec, bound(engine(spec.engine).job(spec, name)), found)
            report = flow.run(
                plan, self.root, self.command, self.observer.watcher(one, hosts),
                tag=self.tag, probe=False, trial=trial, stopped=self.stop.is_set,
                group=self.campaign.group_name(len(hosts), one.devices_per_node),
            )  # fmt: skip
        except flow.UnwrittenReportError as fault:
            report = fault.report
        except flow.CancelledRunError:
            return None
        except PacelineError as fault:
            return _without_run(spec, trial, fault)
        record = read_record(self.root / report.result.run)
        return trial_result(record, report.result, trial)

    def _note(self, one: PlannedRound, result: TrialResult | None) -> None:
        if result is None:
            return
        self.trials[result.place] = result
        self._tried.add(result.place)
        if result.started_unix and result.ended_unix:
            self._seconds.append(result.ended_unix - result.started_unix)
        self.observer.ended(result, self._remaining(one))

    def _learn(self, one: PlannedRound) -> None:
        """Which hosts are lost, and whether anything works at all."""
        of_round = [t for t in self.trials.values() if t.round == one.number]
        failed = sorted((t for t in of_round if not t.ok), key=lambda one: one.hosts)
        if not failed:
            return
        cause = failed[0].reason or failed[0].status
        # In a round in which others had a value, a host whose run alone failed is taken to be bad.
        alone = one.nodes == 1 and len(failed) < len(of_round)
        named = {
            host: trial.reason or trial.status
            for trial in failed
            for host in trial.faulty_hosts or (trial.hosts if alone and trial.status in BAD else ())
            if host in self.campaign.hosts and host not in self.lost
        }
        if fault := allocation_fault(self.campaign.points[0].spec.cluster):
            self.halted = fault
        elif len(named) + len(self.lost) == len(self.campaign.hosts) > 1:
            self.halted = f"every host is at fault, or this machine: {cause}"
        elif not any(trial.ok for trial in self.trials.values()):
            self.halted = f"no sub-cluster of the first round has a value: {cause}"
        else:
            self._lose(named)

    def _lose(self, named: Mapping[str, str]) -> None:
        self.lost |= named
        for host, why in named.items():
            self.observer.lost(host, why)

    def _groups(self, one: PlannedRound) -> list[Group]:
        """The sub-clusters of a round; those with a lost host are put together anew without it."""
        whole = [g for g in one.groups if self._has_value(one, g) or not self.lost.keys() & set(g)]
        if len(whole) == len(one.groups) or one.purpose != "plan":
            return whole
        used = {host for g in whole for host in g}
        members = [host for g in one.groups for host in g] + list(one.left_over)
        pool = [host for host in members if host not in used and host not in self.lost]
        end = len(pool) // one.nodes * one.nodes
        self.unplaced[one.number] = tuple(pool[end:])
        return [*whole, *(tuple(pool[at : at + one.nodes]) for at in range(0, end, one.nodes))]

    def _has_value(self, one: PlannedRound, hosts: Group) -> bool:
        known = self.trials.get((one.number, hosts))
        return known is not None and known.ok

    def _remaining(self, now: PlannedRound) -> Remaining:
        """What is left from the round `now` on."""
        per_round = [
            len(self.missing(one)) for one in self.campaign.plan if one.number >= now.number
        ]
        open_rounds = [n for n in per_round if n]
        turns = sum(-(-n // self.limits.max_parallel) for n in open_rounds)
        seconds = turns * median(self._seconds) if self._seconds else None
        return Remaining(sum(open_rounds), len(open_rounds), seconds)


def _without_run(spec: RunSpec, trial: Trial, fault: PacelineError) -> TrialResult:
    """A sub-cluster whose run the machine did not let begin, or whose folder could not be written."""
    now = time.time()
    return TrialResult(
        round=trial.round, purpose=trial.purpose, nodes=len(trial.hosts),
        devices_per_node=spec.cluster.devices_per_node, hosts=trial.hosts, run=None,
        status="failed", reason=str(fault), global_batch=spec.training.global_batch,
        ended_unix=now, faulty_hosts=fault.hosts,
    )  # fmt: skip
