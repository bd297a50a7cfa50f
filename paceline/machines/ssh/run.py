"""Job on several hosts, which is monitored and ended on all hosts if it fails on any."""

from __future__ import annotations

import math
import secrets
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.hardware import SshSettings
from paceline.core.hosts import compress
from paceline.core.text import whole_number
from paceline.machines import Handle, JobEnd
from paceline.machines.ssh import remote
from paceline.machines.ssh.connection import MAX_MISSED_HEARTBEATS, explain, ssh_argv
from paceline.machines.ssh.session import Fanout, Session

FOLLOW_S = 5.0
"""Time in seconds that the other hosts have to report their own failures after the first one."""
CONFIRM_S = remote.GRACE_S + 3.0
"""Time in seconds that a host has to confirm that its ranks have ended."""
SLACK_S = 2.0
"""Time in seconds that a heartbeat may take beyond ssh's own limit."""
ROUNDS = 50
"""Maximum number of reads per check while more output arrives. Large output must not have to wait
for the next check."""
LOST_CODE = 255
"""Exit code of ssh when its connection is lost."""


@dataclass
class SshHost:
    """State of the job on one host."""

    node: int
    session: Session
    group: int = 0
    """Process group on the host; 0 until the host has reported it."""
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    """Mark in the environment of the job's processes."""
    code: int | None = None
    """Exit code of node.sh, as reported by the host."""
    failed_s: float | None = None
    lost_reason: str | None = None
    """Reason why the connection ended before the job did."""
    last_heartbeat: int = 0
    """Number of the last heartbeat that the host returned."""

    @property
    def over(self) -> bool:
        return self.code is not None or self.lost_reason is not None

    def update(self) -> None:
        """Process received messages."""
        while self.session.inbox:
            _, word, text = self.session.inbox.popleft()
            number = whole_number(text)
            if number is None:
                continue
            if word == "@pgid":
                self.group = number
            elif word == "@alive":
                self.last_heartbeat = number
            elif word == "@rc":
                self.code = number
        if self.session.ended and not self.over:
            self.lose(explain("\n".join(self.session.messages))[0])
        if self.failed_s is None and (self.code or self.lost_reason):
            self.failed_s = time.monotonic()

    def lose(self, reason: str) -> None:
        """Record that the connection is lost, and end its ssh."""
        self.lost_reason = self.lost_reason or reason
        self.session.kill()


@dataclass
class SshRun(Handle):
    """A started job on several hosts."""

    fanout: Fanout
    hosts: list[SshHost]
    settings: SshSettings
    sockets: Path
    deadline: float | None = None
    _sent_at: dict[int, float] = field(default_factory=dict[int, float])
    """Time at which each heartbeat was sent, until all hosts have returned it."""
    _last_sent: int = 0
    _updated_s: float = field(default_factory=time.monotonic)
    _failure_heartbeat: int | None = None
    """Number of the heartbeat that was sent when the first host had failed."""
    _hung_up_s: float = math.inf
    """Time since which the hosts are ending the job on request."""
    _closed: bool = False

    @property
    def timed_out(self) -> bool:
        """True when the job's time limit has passed."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def poll(self) -> int | None:
        """Return the exit code if the job has ended on all hosts, else None."""
        if self._closed:
            return self._code()
        self._update()
        if self._failure_is_clear() or all(host.session.ended for host in self.hosts):
            return self.stop()
        return None

    def stop(self) -> int:
        """End every process of the job on every host and return the exit code."""
        if self._closed:
            return self._code()
        try:
            self._hang_up()
            self._end_by_group()
        finally:
            self.close()
        return self._code()

    def sweep(self) -> None:
        """End the connections; each host has itself ended what the job left behind."""
        self.close()

    def verdict(self) -> JobEnd | None:
        """Return hosts whose connection was lost, or the one whose ranks could not be started."""
        lost_hosts = [host for host in self.hosts if host.lost_reason]
        if lost_hosts:
            names = tuple(host.session.host for host in lost_hosts)
            reasons = "; ".join(dict.fromkeys(host.lost_reason or "" for host in lost_hosts))
            who = compress(names)
            if len(lost_hosts) == len(self.hosts) > 1:
                who += " (all hosts: check this machine's own network first)"
            return JobEnd("failed", f"{who}: the connection was lost: {reasons}", names)
        first = self._first_failure()
        if first is None:
            return None
        output = (first.session.last_output or "\n".join(first.session.messages)).strip()
        if "@exit rank=" in output:
            return None
        last_words = f": {output.splitlines()[-1][:200]}" if output else ""
        name = first.session.host
        return JobEnd("failed", f"{name}: ended with code {first.code}{last_words}", (name,))

    def close(self) -> None:
        """End the local ssh processes; hosts that still run the job end it when they notice."""
        self._closed = True
        self.fanout.close()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def _update(self) -> None:
        """Read from every host, send a heartbeat if due, and find hosts that return none."""
        now = time.monotonic()
        pause_s, self._updated_s = now - self._updated_s, now
        if pause_s > SLACK_S:  # this process itself was stopped, so no host is late
            self._sent_at = {number: at + pause_s for number, at in self._sent_at.items()}
        for _ in range(ROUNDS):
            if not self.fanout.step(0):
                break
        for host in self.hosts:
            host.update()
        if now - max(self._sent_at.values(), default=0.0) >= self.settings.alive_interval_s:
            self._send_heartbeat(now)
        limit_s = MAX_MISSED_HEARTBEATS * self.settings.alive_interval_s + SLACK_S
        for host in self.hosts:
            waits_s = now - self._sent_at.get(host.last_heartbeat + 1, now)
            if not host.over and waits_s > limit_s:
                host.lose(f"no heartbeat for {waits_s:.0f} s")

    def _send_heartbeat(self, now: float) -> None:
        self._last_sent += 1
        self._sent_at[self._last_sent] = now
        running = [host for host in self.hosts if not host.over]
        oldest = min((host.last_heartbeat for host in running), default=self._last_sent)
        self._sent_at = {n: at for n, at in self._sent_at.items() if n > oldest}
        for host in running:
            host.session.send(f"{self._last_sent}\n")
            host.session.write()

    def _failure_is_clear(self) -> bool:
        """Return True if a host has failed and the state of all others is known.

        The others have had `FOLLOW_S` to report, and each has answered a heartbeat, ended or been
        lost.
        """
        failures = [host.failed_s for host in self.hosts if host.failed_s is not None]
        if not failures or all(host.over for host in self.hosts):
            return False
        if self._failure_heartbeat is None:
            self._send_heartbeat(time.monotonic())
            self._failure_heartbeat = self._last_sent
        is_complete = all(
            host.over or host.last_heartbeat >= self._failure_heartbeat for host in self.hosts
        )
        return is_complete and time.monotonic() - min(failures) > FOLLOW_S

    def _hang_up(self) -> None:
        """End the first connections, and wait until the hosts report the end of the job."""
        self._hung_up_s = time.monotonic()
        for host in self.hosts:
            host.session.hang_up()
        deadline = time.monotonic() + CONFIRM_S
        while time.monotonic() < deadline and not all(h.session.ended for h in self.hosts):
            self.fanout.step(0.05)
            for host in self.hosts:
                host.update()

    def _end_by_group(self) -> None:
        """End jobs whose end was not confirmed, by their groups, through second connections.

        These share the first connection of a host that still answered. If that fails, and for all
        other hosts, they are new connections.
        """
        remaining = [host for host in self.hosts if host.code is None]
        for host in remaining:
            host.lost_reason = host.lost_reason or "it did not confirm the end of its ranks"
        remaining = self._end_remotely(
            [host for host in remaining if self._was_responsive(host)], shared=True
        ) + [host for host in remaining if not self._was_responsive(host)]
        for host in remaining:
            host.session.kill()
        self._end_remotely(remaining, shared=False)

    def _was_responsive(self, host: SshHost) -> bool:
        """Return True if the host had returned its heartbeats when it was asked to end the job."""
        sent_s = self._sent_at.get(host.last_heartbeat + 1, self._hung_up_s)
        late_s = self._hung_up_s - sent_s
        return not host.session.ended and late_s < self.settings.alive_interval_s

    def _end_remotely(self, hosts: list[SshHost], shared: bool) -> list[SshHost]:
        """Return the hosts that did not end their ranks through a second connection.

        `shared` reuses the first connection of each host.
        """
        enders: list[Session] = []
        for host in hosts:
            control = str(self.sockets / str(host.node)) if shared else None
            argv = ssh_argv(host.session.host, self.settings, control)
            enders.append(Session(host.session.host, argv))
            enders[-1].send(remote.end(host.mark, host.group))
        second = Fanout(enders)
        deadline = time.monotonic() + self.settings.connect_timeout_s + CONFIRM_S
        try:
            while time.monotonic() < deadline and not all(ender.ended for ender in enders):
                second.step(0.05)
        finally:
            second.close()
        return [host for host, ender in zip(hosts, enders, strict=True) if not ender.inbox]

    def _code(self) -> int:
        first = self._first_failure()
        if first is not None:
            return LOST_CODE if first.code is None else first.code
        code = next((host.code for host in self.hosts if host.code), None)
        return code or (0 if all(host.code == 0 for host in self.hosts) else LOST_CODE)

    def _first_failure(self) -> SshHost | None:
        """Return the host that failed first without being asked to end, or None."""
        failed = [h for h in self.hosts if h.failed_s is not None and h.failed_s < self._hung_up_s]
        return min(failed, key=lambda host: host.failed_s or 0.0, default=None)
