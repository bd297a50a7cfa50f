"""The test bed: virtual hosts on this machine with real daemons, and faults to put on them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any, TypeVar

from tests.clusters.bed import site as ground
from tests.clusters.bed.accounting import Accounting
from tests.clusters.bed.host import Host
from tests.clusters.bed.plan import Plan
from tests.clusters.bed.process import BedError
from tests.clusters.bed.repair import repair
from tests.clusters.bed.site import Site
from tests.clusters.bed.slurm import Slurm
from tests.clusters.bed.sshd import Sshd

__all__ = ["Bed", "BedError", "Host", "Plan"]


class Bed:
    """Hosts node-001, node-002, ... and what runs on them; each fault is undone by `repair`."""

    def __init__(self, site: Site, plan: Plan) -> None:
        """Use `Bed.up` for a new one and `Bed.find` for one that is there."""
        self.site, self.plan = site, plan
        self.hosts = {h.name: h for h in (Host(site, f"node-{i:03}", i) for i in _count(plan))}
        self.head = Host(site, "head", ground.HEAD)
        self.shared = site.folder / "shared"
        every = list(self.hosts.values())
        self._sshd = Sshd(site.folder / "ssh", every, plan.slots)
        folder = site.folder / "slurm"
        accounting = Accounting(folder, self.head) if plan.accounting else None
        self._slurm = Slurm(folder, self.head, every, plan, accounting)

    @classmethod
    def up(cls, name: str, plan: Plan, *, tied: bool = False) -> Bed:
        """A new bed with all its daemons running; `tied` lets it end with this process.

        Raises BedError where this machine cannot have it.
        """
        if not 1 <= plan.hosts <= ground.MAX_HOSTS:
            raise BedError(f"a bed has 1 to {ground.MAX_HOSTS} hosts, not {plan.hosts}")
        bed = cls(ground.claim(name, tied=tied), plan)
        try:
            bed._start()
        except BaseException:
            bed.down()
            raise
        return bed

    @classmethod
    def find(cls, name: str) -> Bed:
        """The bed of that name that is up; raises BedError where there is none."""
        site = ground.find(name)
        return cls(site, Plan(**json.loads((site.folder / "plan.json").read_text())))

    @property
    def names(self) -> list[str]:
        """The hosts' names, in order."""
        return list(self.hosts)

    @property
    def addresses(self) -> list[str]:
        """The hosts' addresses, in order."""
        return [host.address for host in self.hosts.values()]

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`; known_hosts and hostfile are in the same folder."""
        return self.site.folder / "ssh" / "ssh_config"

    @property
    def hostfile(self) -> Path:
        """Lines `node-001 slots=N`."""
        return self.site.folder / "ssh" / "hostfile"

    @property
    def hosts_file(self) -> Path:
        """What the hosts see as /etc/hosts; the names are unknown outside."""
        return self.site.folder / "hosts.txt"

    @property
    def settings(self) -> dict[str, str]:
        """Environment that clients need, and nothing else."""
        return {"SLURM_CONF": str(self.slurm.conf)} if self.plan.slurm else {}

    @property
    def env(self) -> dict[str, str]:
        """This process's environment together with `settings`."""
        return {**os.environ, **self.settings}

    @property
    def sshd(self) -> Sshd:
        """Its SSH servers; raises BedError where it was planned without."""
        return _planned(self._sshd, self.plan.ssh, "sshd")

    @property
    def slurm(self) -> Slurm:
        """Its Slurm; raises BedError where it was planned without."""
        return _planned(self._slurm, self.plan.slurm, "Slurm")

    def host(self, name: str) -> Host:
        """The host of that name, the controller's among them; raises BedError for none."""
        hosts = {**self.hosts, **({self.head.name: self.head} if self.plan.slurm else {})}
        if name not in hosts:
            raise BedError(
                f"no host {name!r} in bed {self.site.name}; there are {', '.join(hosts)}"
            )
        return hosts[name]

    def ssh(self, name: str, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """What a command came to on a host over SSH; options as of subprocess.run."""
        argv = ["ssh", "-F", str(self.ssh_config), "-o", "BatchMode=yes", name, *command]
        settings = {"text": True, "capture_output": True, "check": False, **options}
        return subprocess.run(argv, **settings)

    def boot(self, name: str) -> None:
        """Starts a host that crashed, and its daemons."""
        host = self.host(name)
        host.begin_boot()
        host.end_boot()
        if host is self.head:
            self.slurm.start_head()
        else:
            self._serve([host])

    def repair(self) -> None:
        """Takes away every fault, cancels every job, and ends what still runs on the hosts."""
        repair(self)

    def down(self) -> None:
        """Ends all that runs in the bed and removes its folder."""
        self.site.remove()
        for host in (self.head, *self.hosts.values()):
            host.reap()

    def _start(self) -> None:
        (self.site.folder / "plan.json").write_text(json.dumps(vars(self.plan)))
        machines = [*([self.head] if self.plan.slurm else []), *self.hosts.values()]
        lines = [f"{host.address} {host.name}\n" for host in machines]
        lines += [f"{self.site.address(ground.OUTSIDE)} {socket.gethostname()}\n"]
        self.hosts_file.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        for host in machines:
            host.begin_boot()
        for host in machines:
            host.end_boot()
        if self.plan.cores:
            for host in self.hosts.values():
                host.limit(self.plan.cores)
        if self.plan.favoured:
            self.host("node-001").groups.favour()
        if self.plan.ssh:
            self.sshd.prepare()
        if self.plan.slurm:
            self.slurm.prepare()
            self.slurm.start_head()
        self._serve(list(self.hosts.values()))

    def _serve(self, hosts: list[Host]) -> None:
        if self.plan.ssh:
            self.sshd.start(hosts)
        if self.plan.slurm:
            self.slurm.start(hosts)


Part = TypeVar("Part")


def _planned(part: Part, planned: bool, name: str) -> Part:
    if not planned:
        raise BedError(f"this bed was planned without {name}")
    return part


def _count(plan: Plan) -> range:
    return range(1, plan.hosts + 1)
