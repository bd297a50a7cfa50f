"""Puts a bed back into the state that it had when it was new."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.clusters.bed.host import Host
from tests.clusters.bed.process import Process

if TYPE_CHECKING:
    from tests.clusters.bed import Bed

GRACE_S = 8.0
"""How long cancelled jobs and what they started may take to end before the rest is killed."""


def repair(bed: Bed) -> None:
    """Takes away every fault, cancels every job, and ends what still runs on the hosts."""
    if bed.plan.slurm and not bed.head.up:
        bed.boot(bed.head.name)
    for host in bed.hosts.values():
        mend(bed, host)
    if bed.plan.slurm:
        bed.slurm.cancel_all()
    sweep(bed, GRACE_S if bed.plan.slurm else 0.0)
    if bed.plan.slurm:
        bed.slurm.recover()


def mend(bed: Bed, host: Host) -> None:
    """Undoes all that `Host` and `Sshd` can do to a host, whether it was done or not."""
    if host.up:
        host.thaw()
        host.plug()
        for folder in host.covered():
            host.uncover(folder)
    else:
        bed.boot(host.name)
    host.limit(bed.plan.cores)
    if bed.plan.ssh:
        bed.sshd.let_in(host)
        if not any(line.startswith("sshd: /usr/sbin/sshd") for line in host.processes().values()):
            bed.sshd.start([host])


def sweep(bed: Bed, grace_s: float) -> None:
    """Ends everything on the hosts but the daemons; Slurm's steps may end by themselves first."""
    end = time.monotonic() + grace_s
    while True:
        left = [pid for host in bed.hosts.values() for pid in host.leftovers()]
        if not left or time.monotonic() >= end:
            break
        time.sleep(0.1)
    for process in filter(None, map(Process.of, left)):
        process.kill()
