"""Names under which real hosts are reached: two of one machine, and IPv6 addresses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.core.hosts import parse_hostfile
from paceline.core.job import Job
from tests.clusters.bed import Bed
from tests.clusters.bed.process import call
from tests.clusters.ssh_jobs import follow, log_of, make_job, start

MEET = """
import os, socket, time
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(place, family=socket.AF_INET6) as server:
        server.accept()
else:
    for _ in range(300):
        try:
            socket.create_connection(place).close()
            break
        except OSError:
            time.sleep(0.1)
print("met at", *place)
"""


def job_on(bed: Bed, names: Mapping[str, str], folder: Path, **fields: object) -> Job:
    """A job on the bed's hosts under other names: HostName of ssh, and whose key is theirs."""
    entries = [
        f"Host {name}\n  HostName {name if ':' in name else bed.host(host).address}\n"
        f"  HostKeyAlias {host}\n"
        for name, host in names.items()
    ]
    config = folder / "ssh_config"
    config.write_text("".join(entries) + bed.ssh_config.read_text())
    job = make_job(bed, list(names), 0)
    assert job.cluster
    settings = job.cluster.ssh.model_copy(update={"config": str(config)})
    cluster = job.cluster.model_copy(update={"ssh": settings})
    return make_job(bed, list(names), 0, cluster=cluster, **fields)


def test_two_names_of_one_host_are_refused_and_its_neighbours_are_not(
    ssh_hosts: Bed, tmp_path: Path
) -> None:
    names = {"node-001": "node-001", "node-002": "node-002", "login": "node-001"}
    fault = r"^login: is the same machine as node-001: node-001 at [0-9.]+; list each machine once"
    with pytest.raises(SystemFaultError, match=fault):
        start(job_on(ssh_hosts, names, tmp_path), tmp_path / "run")


def test_hosts_are_reached_and_meet_at_ipv6_addresses(ssh_hosts: Bed, tmp_path: Path) -> None:
    hosts = [host.name for host in parse_hostfile("[fd77::1]:1\nFD77:0::2 slots=1\n")]
    for name, address in zip(ssh_hosts.names, hosts, strict=False):
        node = ssh_hosts.host(name)
        node.call("ip", "-6", "addr", "replace", f"{address}/64", "dev", "eth0", "nodad")
    call(["ip", "-6", "addr", "replace", "fd77::ffff/64", "dev", ssh_hosts.site.bridge, "nodad"])
    names = dict(zip(hosts, ssh_hosts.names, strict=False))
    run = start(job_on(ssh_hosts, names, tmp_path, files={"rank.py": MEET}), tmp_path / "run")
    assert follow([run]) == [0]
    assert [log_of(tmp_path / "run", host)[:16] for host in hosts] == ["met at fd77::1 2"] * 2
