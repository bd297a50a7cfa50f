"""Starts the ranks of one node and watches them; runs on every node, beside no package.

    python agent.py NODES NODE RANKS ADDRESS PORT PROGRAM [ARGUMENT ...]

NODE is this node's number, ADDRESS and PORT are where rank 0 listens. When a rank fails, its exit code
is told in a line of its own (`@exit rank=3 code=-9 at=1700000000.123`, a signal as a negative code)
and the others are ended: SIGTERM, then SIGKILL. The exit code is that of the first rank that failed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any

GRACE_S = 5.0
"""How long ranks may take to leave their stacks after SIGTERM."""
POLL_S = 0.05
PR_SET_PDEATHSIG = 1


class AskedToEndError(Exception):
    """This program was asked to end."""


def main(arguments: list[str]) -> int:
    """Run the ranks of this node; returns 0, or the code of the first that failed."""
    nodes, node, ranks, address, port, *program = arguments
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, asked_to_end)
    first = int(node) * int(ranks)
    common = {
        "WORLD_SIZE": str(int(nodes) * int(ranks)), "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": node, "NODE_RANK": node, "MASTER_ADDR": address, "MASTER_PORT": port,
    }  # fmt: skip
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for local in range(int(ranks)):
            own = {"RANK": str(first + local), "LOCAL_RANK": str(local)}
            processes[first + local] = subprocess.Popen(
                [sys.executable, *program],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **common, **own},
            )
        return watch(processes)
    except AskedToEndError:
        return 128 + signal.SIGTERM
    finally:
        end(list(processes.values()))


def watch(processes: dict[int, subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended well (0) or one has not (its code, which is told)."""
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
    """End what still runs; stopped processes are let go on, into the signal that waits for them."""
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


def asked_to_end(number: int, frame: Any) -> None:
    """Signal handler; a second signal must not disturb the ending."""
    for other in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise AskedToEndError


def die_with_parent() -> None:
    """Have Linux send SIGTERM when whoever started this program dies."""
    if sys.platform.startswith("linux"):
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    if len(sys.argv) < 7:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
