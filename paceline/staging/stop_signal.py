"""Stop signal of staging, which also closes connections that wait for a silent server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx2

from paceline.core.errors import IncompleteError


class StagingStoppedError(IncompleteError):
    """Staging stopped before this asset was complete."""

    def __init__(self, where: str, why: str = "was stopped before it was complete") -> None:
        super().__init__(where, why)


class StopSignal:
    """Stop signal, set once by an interrupt or another thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()

    def is_set(self) -> bool:
        """Return whether staging is to stop."""
        return self._event.is_set()

    def check(self, where: str) -> None:
        """Raise StageEndedError if the signal is set."""
        if self.is_set():
            raise StagingStoppedError(where)

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds` or until the signal is set; return whether it is set."""
        return self._event.wait(seconds)

    def set(self) -> None:
        """Set the signal and shut down every connection, so that no thread blocks on a read."""
        with self._lock:
            self._event.set()
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def closed_on_stop(self, response: httpx2.Response) -> Iterator[None]:
        """Shut down this connection if the signal is set while the block runs."""
        connection = response.extensions["network_stream"].get_extra_info("socket")
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)
