"""Sessions of ssh, one process per host, all driven by one loop without a thread per host."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import SystemFaultError
from paceline.core.interrupts import deferred_interrupts
from paceline.files.programs import die_with_parent
from paceline.machines.ssh.remote import MESSAGE_WORDS

CHUNK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 16
DRAIN_S = 1.0
"""Time in seconds after the end of ssh in which its output may still arrive, through a helper
process that outlives it."""
MAX_MESSAGES = 20
MAX_OUTPUT = 4096


class Message(NamedTuple):
    """Message of the program on the host: arrival time (monotonic), first word, remainder."""

    at_s: float
    word: str
    text: str


@dataclass
class Session:
    """Connection to one host: its ssh process, text to send, and received messages."""

    host: str
    argv: Sequence[str]
    log: Path | None = None
    """File to which the job's output and ssh's messages are appended."""
    outbox: bytearray = field(default_factory=bytearray)
    inbox: deque[Message] = field(default_factory=deque[Message])
    messages: deque[str] = field(default_factory=lambda: deque[str](maxlen=MAX_MESSAGES))
    """Last messages of ssh and of the log-in."""
    last_output: str = ""
    """End of the job's output."""
    settled: bool = False
    """True if the session no longer counts as being set up."""
    started_s: float | None = None
    code: int | None = None
    """Exit code of ssh, once it has ended and all its output was read."""
    process: subprocess.Popen[bytes] | None = None
    channel: socket.socket | None = None
    """Socket for standard input and output."""
    errors: socket.socket | None = None
    _line: bytes = b""
    _exited_s: float | None = None

    @property
    def ended(self) -> bool:
        """True if no more messages will arrive."""
        return self.code is not None

    def start(self) -> None:
        """Start ssh in a session of its own, so that it does not get the terminal's signals."""
        self.started_s = time.monotonic()
        try:
            self.channel, ssh_end = socket.socketpair()
            self.errors, ssh_errors_end = socket.socketpair()
        except OSError as error:
            self.close()
            raise SystemFaultError("ssh", f"cannot be started: {error.strerror}") from error
        self.channel.setblocking(False)
        self.errors.setblocking(False)
        try:
            with deferred_interrupts():  # an interrupt inside Popen would leave an unknown process
                self.process = subprocess.Popen(
                    self.argv,
                    stdin=ssh_end.fileno(),
                    stdout=ssh_end.fileno(),
                    stderr=ssh_errors_end.fileno(),
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM)
                    if sys.platform == "linux"
                    else None,
                )
        except OSError as error:
            self.close()
            raise SystemFaultError("ssh", f"cannot be started: {error.strerror}") from error
        finally:
            ssh_end.close()
            ssh_errors_end.close()

    def send(self, text: str) -> None:
        """Queue a text that the loop will send."""
        self.outbox += text.encode()

    def hang_up(self) -> None:
        """Close the sending direction, upon which the program on the host ends the job."""
        self.outbox.clear()
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.shutdown(socket.SHUT_WR)

    def write(self) -> None:
        """Send as much queued text as possible without blocking."""
        if not self.outbox or self.channel is None:
            return
        try:
            num_sent = self.channel.send(self.outbox)
        except BlockingIOError:
            return
        except OSError:
            self.outbox.clear()  # ssh has ended; its exit code shows why
            return
        del self.outbox[:num_sent]

    def read_channel(self) -> bool:
        """Read the job's output; return False at its end."""
        data = _receive(self.channel)
        if data:
            self._write_log(data)
            self.last_output = (self.last_output + data.decode(errors="replace"))[-MAX_OUTPUT:]
        return data != b""

    def read_errors(self) -> bool:
        """Read messages of ssh and of the program on the host; return False at their end."""
        data = _receive(self.errors)
        *lines, self._line = (self._line + (data or b"")).split(b"\n")
        if data == b"" or len(self._line) > MAX_LINE_BYTES:
            lines, self._line = [*lines, self._line], b""
        for line in lines:
            self._handle_line(line.decode(errors="replace").rstrip("\r"))
        return data != b""

    def reap(self) -> bool:
        """Record the exit code of ssh once its output has ended.

        Returns True if the output has not ended within `DRAIN_S` of ssh's end.
        """
        if self.code is not None or self.process is None or self.process.poll() is None:
            return False
        self._exited_s = self._exited_s or time.monotonic()
        if self.channel is None and self.errors is None:
            self.code = self.process.returncode
        return time.monotonic() - self._exited_s > DRAIN_S

    def kill(self) -> None:
        """Kill the local ssh process."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def close(self) -> None:
        """Close the local sockets."""
        for end in (self.channel, self.errors):
            if end is not None:
                end.close()
        self.channel = self.errors = None

    def _handle_line(self, line: str) -> None:
        word, _, text = line.partition(" ")
        if word in MESSAGE_WORDS:
            self.inbox.append(Message(time.monotonic(), word, text))
        elif line.strip():
            self.messages.append(line)
            self._write_log(f"{line}\n".encode())

    def _write_log(self, data: bytes) -> None:
        if self.log is None:
            return
        try:
            with self.log.open("ab") as file:
                file.write(data)
        except OSError as error:
            raise SystemFaultError(str(self.log), f"cannot be written: {error.strerror}") from error


def _receive(end: socket.socket | None) -> bytes | None:
    """Return received bytes: empty at the end of the stream, None if nothing has arrived."""
    if end is None:
        return None
    try:
        return end.recv(CHUNK_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


AT_ONCE = 32
"""Maximum number of hosts that are set up at the same time; more would delay each other."""
TARGET_OPEN_FILES = 1 << 16
"""Number of open files requested in advance, if the system allows it."""


class Fanout:
    """Sessions that are driven together: `step` starts, sends, receives and reaps."""

    def __init__(self, sessions: Sequence[Session], at_once: int = AT_ONCE) -> None:
        self.sessions, self.at_once = sessions, at_once
        self._waiting = deque(sessions)
        self._selector = selectors.DefaultSelector()

    def step(self, wait_s: float) -> bool:
        """Do what is possible now, then wait up to `wait_s` seconds for events.

        Returns True if anything was received.
        """
        self._start()
        events = self._selector.select(wait_s)
        for key, _ in events:
            session: Session = key.data
            is_output = session.channel is key.fileobj
            if not (session.read_channel() if is_output else session.read_errors()):
                self._finish(session, is_output)
        for session in self.sessions:
            session.write()
            if session.reap():
                self._finish(session, True)
                self._finish(session, False)
        return bool(events)

    def close(self) -> None:
        """End every local ssh process and forget the sessions."""
        self._waiting.clear()
        for session in self.sessions:
            session.kill()
        for session in self.sessions:
            if session.process is not None:
                session.process.wait()
            session.close()
        self._selector.close()

    def _start(self) -> None:
        while self._waiting and self._num_connecting() < self.at_once:
            session = self._waiting.popleft()
            session.start()
            for end in (session.channel, session.errors):
                assert end is not None
                self._selector.register(end, selectors.EVENT_READ, session)

    def _num_connecting(self) -> int:
        return sum(s.started_s is not None and not (s.settled or s.ended) for s in self.sessions)

    def _finish(self, session: Session, is_output: bool) -> None:
        end = session.channel if is_output else session.errors
        if end is None:
            return
        self._selector.unregister(end)
        end.close()
        if is_output:
            session.channel = None
        else:
            session.errors = None


def allow_files(sessions: int) -> None:
    """Raise this process's limit of open files to the needs of this number of sessions.

    Sub-clusters of a scaling test call this at the same time, before any of them has opened its
    files. The limit is therefore raised far above the needs of one. Raises SystemFaultError if the
    system allows fewer.
    """
    # Per session: two sockets, and its log while it is written. 100 for everything else.
    min_files = 3 * sessions + 100 + len(list(Path("/dev/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < min_files:
        raise SystemFaultError(
            "open files",
            f"{sessions} hosts need {min_files}",
            allowed=str(hard),
            remedy="raise `ulimit -Hn`",
        )
    target = TARGET_OPEN_FILES if hard == resource.RLIM_INFINITY else min(TARGET_OPEN_FILES, hard)
    limit = max(min_files, target)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
