"""Start the ranks of one node and monitor them. Runs on every node, without the package.

    python agent.py NODES NODE RANKS ADDRESS PORT PROGRAM [ARGUMENT ...]

NODE is this node's number. Rank 0 listens at ADDRESS and PORT; 0 chooses a free one, for a job
with a single node. When a rank fails, its exit code is
printed in a line of its own (`@exit rank=3 code=-9 at=1700000000.123`; a signal is a negative
code). The other ranks are ended with SIGTERM, then SIGKILL. The exit code of this program is that
of the first rank that failed.

If telemetry_program.py is in the same folder, it samples the node's power and energy until the
ranks have ended. A node on which it cannot be started trains without it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

GRACE_S = 5.0
"""Time in seconds that ranks have to write their stacks after SIGTERM."""
POLL_S = 0.05
SAMPLER, SAMPLES_FOLDER, SAMPLING_S = "telemetry_program.py", "telemetry", 1.0
SAMPLER_GRACE_S = 2.5
"""Time in seconds that the sampler has for its last sample after the ranks have ended."""
SYSTEM_ROOT = "PACELINE_SYSTEM_ROOT"
PR_SET_PDEATHSIG = 1
"""Constant of linux/prctl.h: the signal that this process gets when its parent dies."""
PEER = "PACELINE_PEER"
"""Variable with the name of another host of the job, set if the hosts are known by name only."""
FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Range of rendezvous ports, below Linux's ephemeral ports (32768 and above)."""
SIOCGIFADDR = 0x8915
"""Linux ioctl for the address of an interface. The buffer holds 16 bytes of name, then a
sockaddr_in, whose IPv4 address follows family and port (2 bytes each) and so begins at byte 20."""


class TerminatedError(Exception):
    """Signal that asks this program to end, raised as an exception."""


def main(arguments: list[str]) -> int:
    """Run the ranks of this node; return 0, or the code of the first one that failed."""
    nodes, node, ranks, address, port, *program = arguments
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, raise_terminated)
    first = int(node) * int(ranks)
    common = {
        "WORLD_SIZE": str(int(nodes) * int(ranks)),
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": node,
        "NODE_RANK": node,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port(address)) if port == "0" else port,
        **off_loopback(node, address),
    }
    processes: dict[int, subprocess.Popen[bytes]] = {}
    sampler: subprocess.Popen[bytes] | None = None
    try:
        sampler = start_sampler(int(node))
        for local in range(int(ranks)):
            rank_variables = {"RANK": str(first + local), "LOCAL_RANK": str(local)}
            processes[first + local] = subprocess.Popen(
                [sys.executable, *program],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **common, **rank_variables},
            )
        return watch(processes)
    except TerminatedError:
        return 128 + signal.SIGTERM
    finally:
        ignore_signals()
        if sampler is not None:
            sampler.terminate()
        end(list(processes.values()))
        if sampler is not None:
            end_sampler(sampler)


def free_port(address: str) -> int:
    """Return a port that is free at an address of this host.

    Linux gives none of this range to outgoing connections, so that it most likely stays free.
    """
    ports = random.sample(range(FIRST_PORT, FIRST_PORT + NUM_PORTS), NUM_PORTS)
    for port in ports:
        try:
            with socket.create_server((address, port)):
                return port
        except OSError:
            continue
    raise OSError(f"no port of {FIRST_PORT}-{FIRST_PORT + NUM_PORTS - 1} is free at {address}")


def off_loopback(node: str, address: str) -> dict[str, str]:
    """Return variables for ranks on a host whose own name resolves to a loopback address.

    Without them rank 0 would listen on loopback, and gloo would announce it, where no other host
    can connect. Empty without a peer, or if the route to the peer is loopback as well.
    """
    peer = os.environ.get(PEER) and (os.environ[PEER] if node == "0" else address)
    own_address = address_towards(peer) if peer else ""
    variables: dict[str, str] = {}
    if not own_address or own_address.startswith("127."):
        return variables
    if node == "0" and address_of(address).startswith("127."):
        variables["MASTER_ADDR"] = own_address
    if address_of(socket.gethostname()).startswith("127."):
        for _, name in socket.if_nameindex():
            if interface_address(name) == own_address:
                variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", name)
    return variables


def address_of(name: str) -> str:
    """Return the IPv4 address that this host resolves a name to; empty if there is none."""
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError):
        return ""


def address_towards(peer: str) -> str:
    """Return this host's IPv4 address on the route to `peer`; empty if there is no route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def start_sampler(node: int) -> subprocess.Popen[bytes] | None:
    """Start the program that samples this node into a file of its own; None if there is none.

    The sampler ends by itself when this program is gone, however that ended.
    """
    if not os.path.exists(SAMPLER):  # noqa: PTH110
        return None
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", platform.node())
    file = f"{SAMPLES_FOLDER}/{node:05d}-{host}.jsonl"
    options = [file, str(SAMPLING_S), os.environ.get(SYSTEM_ROOT) or "/", str(os.getpid())]
    try:
        os.makedirs(SAMPLES_FOLDER, exist_ok=True)  # noqa: PTH103
        return subprocess.Popen(
            [sys.executable, SAMPLER, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:  # a full disk or process limit must not end the run that is sampled
        return None


def end_sampler(sampler: subprocess.Popen[bytes]) -> None:
    """Wait briefly for the last sample of a sampler that got SIGTERM, then kill it."""
    try:
        sampler.wait(SAMPLER_GRACE_S)
    except subprocess.TimeoutExpired:
        sampler.kill()
        sampler.wait()


def watch(processes: dict[int, subprocess.Popen[bytes]]) -> int:
    """Wait for the ranks and return 0 if all succeed.

    Otherwise the first failure is printed, and its exit code is returned.
    """
    running = dict(processes)
    while running:
        for rank, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[rank]
            if code:
                print(f"@exit rank={rank} code={code} at={time.time():.3f}", flush=True)
                return code if code > 0 else 128 - code
        time.sleep(POLL_S)
    return 0


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End processes that still run, with SIGTERM and then SIGKILL.

    Stopped processes are continued, so that they receive the pending SIGTERM.
    """
    for number in (signal.SIGTERM, signal.SIGCONT):
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(p.poll() is None for p in processes):
        time.sleep(POLL_S)
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def raise_terminated(number: int, frame: Any) -> None:
    """Handle a signal that ends this program; a second one must not disturb the shutdown."""
    ignore_signals()
    raise TerminatedError


def ignore_signals() -> None:
    """Ignore signals during the shutdown, which may have started without one."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def die_with_parent() -> None:
    """Have Linux send SIGTERM to this program when its parent dies."""
    if sys.platform.startswith("linux"):
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    if len(sys.argv) < 7:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
