"""The end of a staging, also of what waits for a server that says nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx2

from paceline.core.errors import IncompleteError


class StageEndedError(IncompleteError):
    """The staging was ended before this was whole."""

    def __init__(self, where: str, why: str = "was ended before it was whole") -> None:
        super().__init__(where, why)


class StageEnd:
    """Set once: by an interrupt, from another thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()

    def is_set(self) -> bool:
        """Whether the staging is to end."""
        return self._event.is_set()

    def check(self, where: str) -> None:
        """Raise StageEndedError once it has come."""
        if self.is_set():
            raise StageEndedError(where)

    def wait(self, seconds: float) -> bool:
        """Wait, at most until the end; whether it has come."""
        return self._event.wait(seconds)

    def set(self) -> None:
        """End it: every connection is broken, so that nobody waits for what comes no more."""
        with self._lock:
            self._event.set()
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def breaking(self, response: httpx2.Response) -> Iterator[None]:
        """Let the end break this connection while the block runs."""
        connection = response.extensions["network_stream"].get_extra_info("socket")
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)
