"""Where the ranks of several hosts meet: an address that all of them reach, and a free port."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence

from paceline.core.errors import SystemFaultError
from paceline.core.job import Job
from paceline.machines.node.script import rendezvous_port
from paceline.machines.ssh import remote
from paceline.machines.ssh.checks import ANSWER_LIMIT_S, HostCheck
from paceline.machines.ssh.fanout import Fanout
from paceline.machines.ssh.host_rules import is_loopback

PORTS_TRIED = 16
LOOPBACK = "127.0.0.1"


def rendezvous_address(checks: Sequence[HostCheck]) -> str:
    """An address of the first host at which all of them find it.

    Of the interface that was asked for; else what the others find for its name, unless that is a
    loopback address; else where this machine reached it, loopback only when that holds for all
    hosts. One host alone needs no other than loopback.
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
        "the hosts find no common address for it",
        allowed="one they all resolve alike",
        remedy="name the network interface (--interface)",
    )


def rendezvous(fanout: Fanout, checks: Sequence[HostCheck], job: Job, run: str) -> tuple[str, int]:
    """The address, and a port that is free on the first host; raises SystemFaultError."""
    address, session = rendezvous_address(checks), fanout.sessions[0]
    ports = [str(rendezvous_port(run, attempt)) for attempt in range(PORTS_TRIED)]
    session.send(remote.ask(job.python, "port", address, *ports))
    deadline = time.monotonic() + ANSWER_LIMIT_S
    while not session.heard and not session.ended and time.monotonic() < deadline:
        fanout.step(0.05)
    answer = session.heard.popleft() if session.heard else None
    if answer is None or answer.word != "@facts":
        raise SystemFaultError(session.host, "did not say which port is free")
    offer = json.loads(answer.rest)
    if offer["port"] is None:
        raise SystemFaultError(
            session.host,
            f"cannot listen at {address}: {offer['why']}",
            allowed="an address of its own and a free port",
            remedy="name the network interface (--interface)",
        )
    return address, offer["port"]


def gloo_interface(check: HostCheck, job: Job) -> dict[str, str]:
    """The variable that keeps gloo off the loopback address that some hosts' own names have.

    Empty where the job names an interface, runs on one host, or the host's name is no such trap.
    """
    chosen = (job.cluster and job.cluster.interface) or "GLOO_SOCKET_IFNAME" in job.env
    if job.nodes == 1 or chosen or not check.reached_on or not is_loopback(check.own_address):
        return {}
    return {"GLOO_SOCKET_IFNAME": check.reached_on}
