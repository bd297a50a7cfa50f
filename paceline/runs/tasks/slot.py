"""One slot of a cluster or of a machine: runs moved to it, and the loss of its hosts."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

from paceline.core.errors import PacelineError, UserError
from paceline.core.hardware import Cluster
from paceline.core.hosts import compress
from paceline.core.result import Result
from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.files.run_folder import read_record
from paceline.machines.node.bind import Core, even_shares
from paceline.machines.node.binding import bound, bound_to
from paceline.machines.slurm.client import UnknownJobError, from_allocation
from paceline.runs.plan import Plan

MOST_SLOTS = 128
"""Runs at the same time, unless fewer are asked for: each costs this process a thread."""


@dataclass(frozen=True)
class JobSlot:
    """Where one run at a time takes place; without anything it is a place in Slurm's queue."""

    number: int
    """From 1."""
    hosts: tuple[str, ...] = ()
    cores: tuple[Core, ...] = ()
    """On one machine: its share of the cores."""
    devices: tuple[str, ...] = ()
    """On one machine: its share of the GPUs, as CUDA_VISIBLE_DEVICES names them."""

    @property
    def name(self) -> str:
        """Its hosts in short, else its number."""
        return compress(self.hosts) if self.hosts else f"part {self.number}"


def numbered_slots(count: int) -> tuple[JobSlot, ...]:
    """So many slots without hosts, from number 1."""
    return tuple(JobSlot(number) for number in range(1, count + 1))


def on_hosts(spec: RunSpec, hosts: Sequence[str]) -> RunSpec:
    """The same run on these hosts."""
    names = () if spec.cluster.runs_here else tuple(hosts)
    # Another node in the place of a lost one would be measured under its name.
    slurm_settings = spec.cluster.slurm.model_copy(update={"retries": 0})
    where = {"nodes": len(hosts), "hosts": names, "slurm": slurm_settings}
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update=where)})


def plan_on(plan: Plan, slot: JobSlot) -> Plan:
    """The plan moved to a slot."""
    if slot.hosts:
        spec = on_hosts(plan.spec, slot.hosts)
        return replace(plan, spec=spec, job=bound(engine(spec.engine).job(spec, plan.job.name)))
    job = plan.job
    if slot.cores:
        job = bound_to(job, even_shares(list(slot.cores), job.devices_per_node))
    if slot.devices:
        job = replace(job, env={**job.env, "CUDA_VISIBLE_DEVICES": ",".join(slot.devices)})
    return replace(plan, job=job)


BROKEN_LAUNCH = ("failed", "incomplete")
"""Statuses with which a host at fault is taken out; lack of memory is the layout's matter."""
ASK_AGAIN_S = 2.0
NONE_WHOLE = "no part of the hosts is whole any more"

TaskOutcome = Result | PacelineError
"""How a task's run ended: as a result, or as a fault that left none."""


@dataclass
class Losses:
    """The slots that are whole, and the tasks that were taken from others.

    A slot of which a host is lost gets nothing more, unless it is the last: then the same task is
    tried there once more, because a connection that broke once may be back.
    """

    slots: Sequence[JobSlot]
    lost: dict[JobSlot, str] = field(default_factory=dict[JobSlot, str])
    """With how the run ended."""
    _moved: set[Hashable] = field(default_factory=set[Hashable])
    _lock: Lock = field(default_factory=Lock)

    @property
    def whole(self) -> list[JobSlot]:
        """Slots that have lost no host."""
        return [slot for slot in self.slots if slot not in self.lost]

    @property
    def halted(self) -> str | None:
        """Why nothing more can run; None while there is a slot."""
        if self.whole:
            return None
        return f"{NONE_WHOLE}: {[*self.lost.values()][-1]}"

    def note(self, slot: JobSlot, task: Hashable, why: str) -> bool:
        """A host of the slot was lost under this task; whether it is tried once more."""
        with self._lock:
            again = task not in self._moved
            self._moved.add(task)
            if not (again and self.whole == [slot]):
                self.lost[slot] = why
            return again


def is_lost(slot: JobSlot, cluster: Cluster, outcome: TaskOutcome, root: Path) -> bool:
    """Whether a run in `root` ended in such a way because of a host of its slot.

    Of a run whose nodes Slurm chooses no host is lost: Slurm gives the next one others.
    """
    faulty = outcome.hosts if isinstance(outcome, PacelineError) else ()
    hosts = slot.hosts or cluster.hosts
    if not hosts and not cluster.allocation:
        return False
    if isinstance(outcome, Result) and outcome.status in BROKEN_LAUNCH:
        faulty = read_record(root / outcome.run).faulty_hosts
    return bool({*faulty} & {*hosts}) if hosts else bool(faulty)


def allocation_fault(cluster: Cluster) -> str | None:
    """Why the Slurm job that all runs are steps of has no hosts any more; None while it has.

    A Slurm that does not answer once, or gives no clear answer twice, is no fault of the job.
    """
    job = cluster.allocation
    if job is None:
        return None
    for pause_s in (ASK_AGAIN_S, 0.0):
        try:
            from_allocation(job)
        except UserError as fault:
            return str(fault)
        except UnknownJobError as fault:
            return f"job {job} is unknown to Slurm: {fault}"
        except PacelineError:
            time.sleep(pause_s)
        else:
            return None
    return None


def why_ended(outcome: TaskOutcome) -> str:
    """How a run ended, in a sentence."""
    return str(outcome) if isinstance(outcome, PacelineError) else outcome.reason or outcome.status


def lost_text(slot: JobSlot, why: str, for_good: bool) -> str:
    """That a host of a slot is lost, and what this means for what is left."""
    if for_good:
        return f"nothing more runs on {slot.name}: {why}"
    return f"{slot.name} lost a host, and there is no other place; once more there: {why}"
