"""Many ssh processes in one loop: no thread a host, and only so many that connect at once."""

from __future__ import annotations

import resource
import selectors
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import SystemFaultError
from paceline.machines.ssh.session import Session

AT_ONCE = 32
"""Hosts that may be on their way to being ready at one time: more would make each other late."""
MOST_FILES = 1 << 16
"""Open files that are asked for beforehand where the system allows them."""


class Fanout:
    """Sessions that are driven together: `step` starts, sends, receives and reaps."""

    def __init__(self, sessions: Sequence[Session], at_once: int = AT_ONCE) -> None:
        self.sessions, self.at_once = sessions, at_once
        self._waiting = deque(sessions)
        self._selector = selectors.DefaultSelector()

    def step(self, wait_s: float) -> bool:
        """Do what can be done now, wait at most so long for more; whether something came."""
        self._start()
        events = self._selector.select(wait_s)
        for key, _ in events:
            session: Session = key.data
            whole = session.channel is key.fileobj
            if not (session.read_channel() if whole else session.read_errors()):
                self._finish(session, whole)
        for session in self.sessions:
            session.write()
            if session.reap():
                self._finish(session, True)
                self._finish(session, False)
        return bool(events)

    def close(self) -> None:
        """End every local ssh and forget the sessions."""
        self._waiting.clear()
        for session in self.sessions:
            session.kill()
        for session in self.sessions:
            if session.process is not None:
                session.process.wait()
            session.close()
        self._selector.close()

    def _start(self) -> None:
        while self._waiting and self._on_their_way() < self.at_once:
            session = self._waiting.popleft()
            session.start()
            for end in (session.channel, session.errors):
                assert end is not None
                self._selector.register(end, selectors.EVENT_READ, session)

    def _on_their_way(self) -> int:
        return sum(s.started_s is not None and not (s.settled or s.ended) for s in self.sessions)

    def _finish(self, session: Session, whole: bool) -> None:
        end = session.channel if whole else session.errors
        if end is None:
            return
        self._selector.unregister(end)
        end.close()
        if whole:
            session.channel = None
        else:
            session.errors = None


def allow_files(sessions: int) -> None:
    """Raise this process's limit of open files to what so many sessions need.

    Sub-clusters of a campaign ask for it at the same time, before any of them has opened its files,
    so it is raised far above the need of one. Raises SystemFaultError when the system allows fewer.
    """
    # Two sockets a session and a file for a moment, its log; 100 for all else meanwhile.
    needed = 3 * sessions + 100 + len(list(Path("/dev/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemFaultError(
            "open files",
            f"{sessions} hosts need {needed}",
            allowed=str(hard),
            remedy="raise `ulimit -Hn`",
        )
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    limit = max(needed, most)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
