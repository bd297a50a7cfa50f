"""One slot of a cluster or of a machine, and a run moved to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.core.hosts import compress
from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.machines.node.bind import Core, even_shares
from paceline.machines.node.binding import bound, bound_to
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
