"""Launcher for hosts reached by ssh: one process group per host, monitored and ended by one loop.

The first connection carries the checks, the job's output and the heartbeats of both ends. When it
ends, the program on the host ends the job. A host that has not confirmed the end is ended through a
second connection, by its recorded process group.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.core.units import pluralize, there_are
from paceline.core.value import Value
from paceline.files.documents import write_text
from paceline.files.run_folder import LOGS_FOLDER, SCRIPT_FILE
from paceline.machines import UnfitHost
from paceline.machines.node.script import NODE_SCRIPT, prepare_node, random_ports, render_node
from paceline.machines.ssh import remote
from paceline.machines.ssh.checks import (
    ANSWER_LIMIT_S,
    HostCheck,
    HostRequirements,
    check_hosts,
    examine,
    is_loopback,
    raise_for_faults,
)
from paceline.machines.ssh.connection import private_folder, ssh_argv
from paceline.machines.ssh.run import SshHost, SshRun
from paceline.machines.ssh.session import Fanout, Session, allow_files

MAX_SILENT_INTERVALS = 12
"""Number of intervals without a heartbeat of the controller after which a host ends its ranks."""


def render(job: Job) -> str:
    """Return node.sh, with comments that show how it is started on each host."""
    cluster = _cluster(job)
    command = shlex.join(ssh_argv(cluster.hosts[0], cluster.ssh)[:-2])
    starts = [
        f"#   {host}: bash {NODE_SCRIPT} {node} ADDRESS PORT"
        for node, host in enumerate(cluster.hosts)
    ]
    lines = [
        "# In the run folder of every host; the first host is asked for ADDRESS and PORT:",
        *starts,
        f"# through: {command} HOST {shlex.quote(remote.COMMAND)}",
    ]
    return render_node(job) + "\n".join(lines) + "\n"


def prepare(job: Job, folder: Path) -> None:
    """Write the job's files and its scripts into the run folder."""
    prepare_node(job, folder)
    write_text(folder / SCRIPT_FILE, render(job))


def submit(job: Job, folder: Path) -> SshRun:
    """Connect to all hosts, check them, and start node.sh on each.

    Raises SystemFaultError with every host at fault, before anything has been started.
    """
    cluster, folder = _cluster(job), folder.resolve()
    allow_files(len(cluster.hosts))
    sockets = private_folder()
    hosts = [
        SshHost(node, _session(host, node, cluster, folder, sockets))
        for node, host in enumerate(cluster.hosts)
    ]
    fanout = Fanout([host.session for host in hosts])
    run = SshRun(fanout, hosts, cluster.ssh, sockets)
    try:
        _start(run, job, folder)
    except BaseException:  # an interrupt must not leave a connection or a socket behind either
        run.close()
        raise
    if job.timeout_s is not None:
        run.deadline = time.monotonic() + job.timeout_s
    return run


def unfit_hosts(cluster: Cluster, folder: Path) -> dict[str, UnfitHost]:
    """Log in to every host; return those on which no job can be started, with the reason."""
    requirements = HostRequirements(
        cluster.interpreter, folder, cluster.interface, cluster.world_size
    )
    checks = check_hosts(cluster.hosts, requirements, cluster.ssh)
    return {c.host: UnfitHost(c.fault, reached=c.answered) for c in checks if c.fault}


def _start(run: SshRun, job: Job, folder: Path) -> None:
    """Check all hosts, then start node.sh on each of them if none is at fault."""
    cluster = _cluster(job)
    for host in run.hosts:
        host.session.send(remote.greeting(job.env))
    world_size = job.nodes * job.ranks_per_node
    requirements = HostRequirements(job.python, folder, cluster.interface, world_size)
    checks = examine(run.fanout, requirements, cluster.ssh)
    raise_for_faults(checks)
    address, port = rendezvous(run.fanout, checks, job)
    silence_s = MAX_SILENT_INTERVALS * cluster.ssh.alive_interval_s
    for host, check in zip(run.hosts, checks, strict=True):
        node = (str(host.node), address, str(port))
        env = gloo_interface(check, job)
        host.session.send(remote.start(str(folder), host.mark, silence_s, *node, env=env))
    run.fanout.step(0)


def _session(name: str, node: int, cluster: Cluster, folder: Path, sockets: Path) -> Session:
    argv = ssh_argv(name, cluster.ssh, str(sockets / str(node)), master=True)
    return Session(name, argv, folder / LOGS_FOLDER / f"host-{name}.log")


def _cluster(job: Job) -> Cluster:
    """Return the job's cluster; raises UserError unless it has one host per node."""
    cluster = job.cluster
    if cluster is None or len(cluster.hosts) != job.nodes:
        count = len(cluster.hosts) if cluster else 0
        raise UserError(
            "hosts",
            f"{there_are(count, 'host')} for {pluralize(job.nodes, 'node')}",
            remedy="list one host per node with --hosts",
        )
    return cluster


LOOPBACK = "127.0.0.1"


def rendezvous_address(checks: Sequence[HostCheck]) -> str:
    """Return an address of the first host at which every host can reach it.

    It is the address of the requested interface, if any. Otherwise it is the address that the other
    hosts resolve its name to, unless that is a loopback address. Otherwise it is the address at
    which this machine reached the host. Loopback is used only if all hosts were reached by it, or
    for a single host. Raises SystemFaultError if there is no common address.
    """
    first, *others = checks
    if first.address:
        return first.address
    if not others:
        return LOOPBACK
    counts = Counter(check.peer_address for check in others)
    address, times = counts.most_common(1)[0]
    if address and times == len(others) and not is_loopback(address):
        return address
    all_loopback = all(is_loopback(check.server_address) for check in checks)
    if first.server_address and (all_loopback or not is_loopback(first.server_address)):
        return first.server_address
    raise SystemFaultError(
        first.host,
        "has no address that all hosts can reach",
        allowed="a name that all hosts resolve to the same address",
        remedy="specify the network interface (--interface)",
    )


def rendezvous(fanout: Fanout, checks: Sequence[HostCheck], job: Job) -> tuple[str, int]:
    """Return the address, and a port that is free on the first host.

    Raises SystemFaultError if no port can be found.
    """
    address, session = rendezvous_address(checks), fanout.sessions[0]
    ports = map(str, random_ports())
    session.send(remote.request_facts(job.python, "port", address, *ports))
    deadline = time.monotonic() + ANSWER_LIMIT_S
    while not session.inbox and not session.ended and time.monotonic() < deadline:
        fanout.step(0.05)
    answer = session.inbox.popleft() if session.inbox else None
    try:
        reply = _PortReply.model_validate_json(answer.text if answer else "")
    except ValidationError:
        raise SystemFaultError(session.host, "did not report a free port") from None
    if reply.port is None:
        raise SystemFaultError(
            session.host,
            f"cannot listen at {address}: {reply.why}",
            allowed="an address of its own and a free port",
            remedy="specify the network interface (--interface)",
        )
    return address, reply.port


class _PortReply(Value):
    """A free port of a host, or the reason why there is none."""

    port: Annotated[int, Field(gt=0, lt=1 << 16)] | None
    why: str = "no port is free"


def gloo_interface(check: HostCheck, job: Job) -> dict[str, str]:
    """Return the variable that keeps gloo off loopback on hosts whose own name resolves to it.

    Empty if the job names an interface or runs on one host, or if the host's name does not resolve
    to a loopback address.
    """
    is_set = (job.cluster and job.cluster.interface) or "GLOO_SOCKET_IFNAME" in job.env
    if job.nodes == 1 or is_set or not check.reached_on or not is_loopback(check.own_address):
        return {}
    return {"GLOO_SOCKET_IFNAME": check.reached_on}
