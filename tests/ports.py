"""Ports for programs that tests start."""

from __future__ import annotations

import itertools
import os
import random
import socket
from contextlib import suppress

LOWEST, HIGHEST = 30_000, 32_767
"""Below those that Linux gives to connections by itself, above those of Paceline's own runs."""
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
"""Of pytest-xdist, each with ports of its own."""


def _own_ports() -> list[int]:
    """This process's ports, from a random one on: other runs of the tests may be under way."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = [*range(LOWEST + worker, HIGHEST + 1, WORKERS)]
    first = random.SystemRandom().randrange(len(ports))
    return ports[first:] + ports[:first]


_next = itertools.cycle(_own_ports())


def free_port() -> int:
    """A port of this machine that nobody listens at, and that no connection is given meanwhile.

    One that the system picks may go to any connection before the program listens at it.
    """
    for _ in range(HIGHEST - LOWEST):
        port = next(_next)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("every port of the tests is taken")
