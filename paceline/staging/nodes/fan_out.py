"""Staged assets on the disks of many nodes, over SSH or as steps of a Slurm job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from paceline.core.errors import PacelineError, UserError
from paceline.core.hardware import Cluster
from paceline.files.staged import read_manifest
from paceline.machines.host_lists import from_allocation
from paceline.machines.slurm import client
from paceline.machines.slurm.script import checked
from paceline.machines.slurm.steps import check_allocation
from paceline.machines.ssh.connection import ssh_argv
from paceline.staging.download_log import DownloadLog, StageWatcher
from paceline.staging.ending import StageEnd
from paceline.staging.nodes.node_copy import NodeCopy, NodeOrder, NodeOutcome, NodeShell

AT_ONCE = 32
"""Nodes that copy at the same time: more would make each other slow where they share a way."""
SILENT_INTERVALS = 12
"""Of signs of life; a node says how far it is every second."""


def node_shells(cluster: Cluster, most: int | None = None) -> tuple[NodeShell, ...]:
    """How each node of a cluster is reached, `most` of them from the front.

    Raises UserError for a cluster that names no nodes, or fewer.
    """
    silence_s = SILENT_INTERVALS * cluster.ssh.alive_interval_s
    python = cluster.interpreter
    if cluster.capabilities.needs_hosts:
        return tuple(
            NodeShell(host, tuple(ssh_argv(host, cluster.ssh)), python, silence_s)
            for host in cluster.hosts[:most]
        )
    allocation = cluster.allocation
    if allocation is None:
        raise UserError(
            "--local",
            "is for the disks of other nodes, and none are named",
            allowed="--hosts FILE|LIST, --allocation JOBID, --cluster FILE with hosts",
            remedy="inside Slurm take nodes first: salloc",
        )
    hosts = cluster.hosts or tuple(host.name for host in from_allocation(allocation))
    check_allocation(allocation, hosts, max(len(hosts), most or 0))
    environment = client.environment({})
    return tuple(
        NodeShell(host, _step(allocation, host), python, silence_s, environment)
        for host in hosts[:most]
    )


def on_nodes(
    shells: Sequence[NodeShell],
    order: NodeOrder,
    watch: StageWatcher = lambda progress: None,
    ended: StageEnd | None = None,
) -> tuple[NodeOutcome, ...]:
    """What became of the assets on each node, in their order; a node that fails stops no other.

    Raises SystemFaultError where a file of this machine cannot be read, StageEndedError at the end.
    """
    ended = ended or StageEnd()
    log = DownloadLog(watch)
    manifests = [read_manifest(folder) for folder in order.folders]
    total = sum(manifest.bytes for manifest in manifests if manifest)
    for shell in shells:
        log.add(shell.host, total)
    talks = [NodeCopy(shell, order, ended, _telling(log, shell.host)) for shell in shells]
    with ThreadPoolExecutor(AT_ONCE, "node") as pool:
        answers = [pool.submit(_talked, talk, log) for talk in talks]
        try:
            wait(answers)
        except BaseException:  # an interrupt too must end what the threads do
            ended.set()
            raise
    for answer in answers:
        if isinstance(error := answer.exception(), PacelineError):
            raise error
    return tuple(answer.result() for answer in answers)


def _talked(talk: NodeCopy, log: DownloadLog) -> NodeOutcome:
    outcome = talk.run()
    log.phase(outcome.host, outcome.fault or outcome.state)
    return outcome


def _telling(log: DownloadLog, host: str) -> Callable[[str, int, int], None]:
    """What a node says of itself, for the display: it says how much there is, not how much more."""
    before = (0, 0)

    def tell(phase: str, present: int, come: int) -> None:
        nonlocal before
        was_there = present - come
        log.present(host, was_there - before[0])
        log.fetched(host, come - before[1])
        log.phase(host, phase)
        before = (was_there, come)

    return tell


def _step(allocation: str, host: str) -> tuple[str, ...]:
    """A shell on one node of a job, beside whatever else runs there."""
    words = ("--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none", "--export=ALL")
    number, name = checked("allocation", allocation), checked("nodelist", host)
    shell = ("bash", "--noprofile", "--norc", "-s")
    return ("srun", f"--jobid={number}", *words, f"--nodelist={name}", *shell)
