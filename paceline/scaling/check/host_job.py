"""A short program on every device of some hosts, with the launchers of a run, and its end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.core.errors import IncompleteError, UserError
from paceline.core.hardware import Cluster, with_secrets
from paceline.core.job import Job
from paceline.core.launchers import capabilities
from paceline.files.trainer_program import PROGRAM_FOLDER, program_files
from paceline.machines import Handle, JobEnd, launcher
from paceline.machines.host_lists import from_allocation
from paceline.machines.node.binding import bound
from paceline.machines.placement import Where, device_kind, placed
from paceline.machines.probe.inventory import inventory, local_cluster

QUESTION_FILE = "question.json"
POLL_S = 0.1


def cluster_of(
    where: Where, device: str = "auto", devices: int | None = None
) -> tuple[Cluster, list[str]]:
    """The hosts as a cluster, each taken to have devices like this machine, and notices.

    `devices` of each host; None takes slots, GPUs as here, or one process. Raises UserError for
    hosts with different numbers of slots.
    """
    machine = inventory()
    kind, notices = device_kind(device, machine)
    can = capabilities(where.kind(os.environ))
    if can.allocations and not where.hosts:
        number = where.allocation or os.environ.get("SLURM_JOB_ID")
        hosts = from_allocation(number) if number else ()
        where = replace(where, hosts=hosts[: where.nodes] if hosts else ())
    slots = {host.slots for host in where.hosts} - {None}
    if len(slots) > 1:
        raise UserError("hosts", "have different numbers of slots", remedy="name them in two parts")
    alone = 2 if can.runs_here else 1
    count = devices or next(iter(slots), None) or (alone if kind == "cpu" else None)
    name = "cpu" if kind == "cpu" else machine["gpus"][0]["name"]
    cluster = local_cluster(machine, name, None, count)
    # How many threads a rank has each host decides by its own cores.
    cluster = cluster.model_copy(update={"threads_per_device": None, "bind": "auto"})
    return placed(cluster, where), notices


def host_job(cluster: Cluster, program: str, question: Mapping[str, Any], limit_s: float) -> Job:
    """A trainer's program, by its name in the package, that reads `question` on every device."""
    files = {**program_files(program), QUESTION_FILE: json.dumps(question) + "\n"}
    return bound(
        Job(
            name=f"paceline-{program.rpartition('.')[2].replace('_', '-')}",
            python=cluster.interpreter,
            program=(PROGRAM_FOLDER, QUESTION_FILE),
            env={"PYTHONUNBUFFERED": "1", **with_secrets(cluster.env, os.environ)},
            files=files,
            nodes=cluster.nodes,
            devices_per_node=cluster.devices_per_node,
            timeout_s=limit_s,
            collective_limit_s=max(20.0, limit_s / 5),
            cluster=cluster,
        )
    )


def run_job(job: Job, folder: Path, wait_s: float, verb: str) -> JobEnd | None:
    """Run it to its end or its limit; what the launcher knows of its end.

    Raises IncompleteError when Slurm gave no place in time; the job is cancelled then.
    """
    assert job.cluster is not None
    machine = launcher(job.cluster.launcher)
    machine.prepare(job, folder)
    handle = machine.submit(job, folder)
    try:
        return ended(handle, wait_s, verb)
    finally:
        handle.sweep()


def ended(handle: Handle, wait_s: float, verb: str) -> JobEnd | None:
    """Wait for the end of what was submitted; raises as `run_job` does."""
    begun_s = time.monotonic()
    try:
        while handle.poll() is None:
            if handle.waiting and time.monotonic() - begun_s > wait_s:
                raise IncompleteError(
                    verb,
                    f"was not begun within {wait_s:g} s: {handle.phase}",
                    remedy="--wait SECONDS, or fewer --nodes",
                )
            if handle.timed_out:
                handle.stop()
                return handle.verdict() or JobEnd("timeout", "did not end in time")
            time.sleep(POLL_S)
    except BaseException:  # an interrupt too must end what runs on the hosts
        handle.stop()
        raise
    return handle.verdict()
