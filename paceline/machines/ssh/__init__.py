"""Hosts that are reached by ssh: one process group a host, followed and ended by one loop.

The first connection carries the checks, the job's output and the signs of life of both ends; when
it ends, the program on the host ends the job. What has not confirmed its end is ended through a
second connection, by its recorded group.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.core.units import counted, there_are
from paceline.files.documents import write_text
from paceline.files.run_folder import LOGS_FOLDER, SCRIPT_FILE
from paceline.machines.node.script import NODE_SCRIPT, prepare_node, render_node
from paceline.machines.ssh import remote
from paceline.machines.ssh.checks import check_hosts, examine
from paceline.machines.ssh.connection import private_folder, ssh_argv
from paceline.machines.ssh.fanout import Fanout, allow_files
from paceline.machines.ssh.host_rules import Questions, raise_for_faults
from paceline.machines.ssh.rendezvous import gloo_interface, rendezvous
from paceline.machines.ssh.run import SshHost, SshRun
from paceline.machines.ssh.session import Session

SILENCES = 12
"""Intervals without a sign of the controller after which a host ends its ranks."""


def render(job: Job) -> str:
    """node.sh, and in comments how it is started on each host."""
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

    Raises SystemFaultError, with every host at fault, before anything has been started.
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
    except BaseException:  # an interrupt too must leave no connection and no socket behind
        run.close()
        raise
    if job.timeout_s is not None:
        run.deadline = time.monotonic() + job.timeout_s
    return run


def unfit_hosts(cluster: Cluster, folder: Path) -> dict[str, str]:
    """Log in to every host; return those on which nothing can be started, with the reason."""
    questions = Questions(cluster.interpreter, folder, cluster.interface, cluster.world_size)
    checks = check_hosts(cluster.hosts, questions, cluster.ssh)
    return {check.host: check.fault for check in checks if check.fault}


def _start(run: SshRun, job: Job, folder: Path) -> None:
    """Check all hosts; start node.sh on each of them when none is at fault."""
    cluster = _cluster(job)
    for host in run.hosts:
        host.session.send(remote.greeting(job.env))
    world_size = job.nodes * job.ranks_per_node
    questions = Questions(job.python, folder, cluster.interface, world_size)
    checks = examine(run.fanout, questions, cluster.ssh)
    raise_for_faults(checks)
    address, port = rendezvous(run.fanout, checks, job, folder.name)
    silence_s = SILENCES * cluster.ssh.alive_interval_s
    for host, check in zip(run.hosts, checks, strict=True):
        node = (str(host.node), address, str(port))
        env = gloo_interface(check, job)
        host.session.send(remote.start(str(folder), host.mark, silence_s, *node, env=env))
    run.fanout.step(0)


def _session(name: str, node: int, cluster: Cluster, folder: Path, sockets: Path) -> Session:
    argv = ssh_argv(name, cluster.ssh, str(sockets / str(node)), master=True)
    return Session(name, argv, folder / LOGS_FOLDER / f"host-{name}.log")


def _cluster(job: Job) -> Cluster:
    """The cluster with a host a node; raises UserError."""
    cluster = job.cluster
    if cluster is None or len(cluster.hosts) != job.nodes:
        count = len(cluster.hosts) if cluster else 0
        raise UserError(
            "hosts",
            f"{there_are(count, 'host')} for {counted(job.nodes, 'node')}",
            remedy="name one for every node with --hosts",
        )
    return cluster
