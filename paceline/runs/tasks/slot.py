"""Slot of a cluster or of a machine: plans moved to it, and the loss of its hosts."""

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
from paceline.machines.node.binding import bind_to_cores, with_binding
from paceline.machines.slurm.client import UnknownJobError, allocation_hosts
from paceline.runs.plan import Plan

MAX_SLOTS = 128
"""Default maximum number of concurrent runs; each needs a thread of this process."""


@dataclass(frozen=True)
class JobSlot:
    """Place for one run at a time; without hosts, cores and devices, a place in Slurm's queue."""

    number: int
    """Number of the slot, from 1."""
    hosts: tuple[str, ...] = ()
    cores: tuple[Core, ...] = ()
    """Share of the cores, on one machine."""
    devices: tuple[str, ...] = ()
    """Share of the GPUs as in CUDA_VISIBLE_DEVICES, on one machine."""

    @property
    def name(self) -> str:
        """Compressed host names, or the number of the slot."""
        return compress(self.hosts) if self.hosts else f"part {self.number}"


def numbered_slots(count: int) -> tuple[JobSlot, ...]:
    """Return `count` slots without hosts, numbered from 1."""
    return tuple(JobSlot(number) for number in range(1, count + 1))


def on_hosts(spec: RunSpec, hosts: Sequence[str]) -> RunSpec:
    """Return the run specification moved to these hosts."""
    names = () if spec.cluster.runs_here else tuple(hosts)
    # A retry on a replacement node would be recorded under the lost node's name.
    slurm_settings = spec.cluster.slurm.model_copy(update={"retries": 0})
    where = {"nodes": len(hosts), "hosts": names, "slurm": slurm_settings}
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update=where)})


def plan_on(plan: Plan, slot: JobSlot) -> Plan:
    """Return the plan moved to a slot."""
    if slot.hosts:
        spec = on_hosts(plan.spec, slot.hosts)
        return replace(
            plan, spec=spec, job=with_binding(engine(spec.engine).job(spec, plan.job.name))
        )
    job = plan.job
    if slot.cores:
        job = bind_to_cores(job, even_shares(list(slot.cores), job.devices_per_node))
    if slot.devices:
        job = replace(job, env={**job.env, "CUDA_VISIBLE_DEVICES": ",".join(slot.devices)})
    return replace(plan, job=job)


BROKEN_LAUNCH = ("failed", "incomplete")
"""Statuses after which a faulty host is excluded; out of memory depends on the layout."""
RETRY_PAUSE_S = 2.0
NO_USABLE_SLOT = "every slot has lost a host"

TaskOutcome = Result | PacelineError
"""Outcome of a task's run: its result, or the error if there is none."""


@dataclass
class LostSlots:
    """Lost slots, and the tasks that were moved from them.

    A slot with a lost host gets no more tasks. On the last slot the same task is retried once,
    because a broken connection may have recovered.
    """

    slots: Sequence[JobSlot]
    reasons: dict[JobSlot, str] = field(default_factory=dict[JobSlot, str])
    """Lost slots, each with the reason."""
    _moved_tasks: set[Hashable] = field(default_factory=set[Hashable])
    _lock: Lock = field(default_factory=Lock)

    @property
    def usable(self) -> list[JobSlot]:
        """Slots that have not lost a host."""
        return [slot for slot in self.slots if slot not in self.reasons]

    @property
    def stop_reason(self) -> str | None:
        """Reason why no more tasks can run; None while a slot remains."""
        if self.usable:
            return None
        return f"{NO_USABLE_SLOT}: {[*self.reasons.values()][-1]}"

    def note(self, slot: JobSlot, task: Hashable, why: str) -> bool:
        """Record that a slot lost a host during this task; return whether to retry the task."""
        with self._lock:
            retry = task not in self._moved_tasks
            self._moved_tasks.add(task)
            if not (retry and self.usable == [slot]):
                self.reasons[slot] = why
            return retry


def is_lost(slot: JobSlot, cluster: Cluster, outcome: TaskOutcome, root: Path) -> bool:
    """Return whether a host of the slot caused the outcome of a run in `root`.

    A run whose nodes Slurm chooses loses no host, because Slurm gives the next run other nodes.
    """
    faulty = outcome.hosts if isinstance(outcome, PacelineError) else ()
    hosts = slot.hosts or cluster.hosts
    if not hosts and not cluster.allocation:
        return False
    if isinstance(outcome, Result) and outcome.status in BROKEN_LAUNCH:
        faulty = read_record(root / outcome.run).faulty_hosts
    return bool({*faulty} & {*hosts}) if hosts else bool(faulty)


def allocation_fault(cluster: Cluster) -> str | None:
    """Return why the Slurm job that contains all runs has no hosts any more; None if it has.

    A query is retried once. If Slurm gives no clear answer to both, the job is assumed to be
    running.
    """
    job = cluster.allocation
    if job is None:
        return None
    for pause_s in (RETRY_PAUSE_S, 0.0):
        try:
            allocation_hosts(job)
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
    """Return how a run ended, in one sentence."""
    return str(outcome) if isinstance(outcome, PacelineError) else outcome.reason or outcome.status


def lost_text(slot: JobSlot, why: str, for_good: bool) -> str:
    """Return the message on a lost host of a slot."""
    if for_good:
        return f"{slot.name} gets no more runs: {why}"
    return f"{slot.name} lost a host and no other slot is left; retrying there: {why}"
