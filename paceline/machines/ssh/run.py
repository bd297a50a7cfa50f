"""A job on several hosts: followed, and ended everywhere when it fails anywhere."""

from __future__ import annotations

import math
import secrets
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.hardware import SshSettings
from paceline.core.hosts import compress
from paceline.machines import Handle, JobEnd
from paceline.machines.ssh import remote
from paceline.machines.ssh.connection import SIGNS_MISSED, meaning, ssh_argv
from paceline.machines.ssh.session import Fanout, Session

FOLLOW_S = 5.0
"""How long the other hosts may take to say their last words after the first has failed."""
CONFIRM_S = remote.GRACE_S + 3.0
"""How long a host may take to say that its ranks have ended."""
SLACK_S = 2.0
"""What a sign of life may take on its way beyond the time that ssh itself allows."""
ROUNDS = 50
"""How often a look reads on while more comes: much output must not wait for the next look."""
LOST_CODE = 255
"""What ssh itself ends with when its connection is lost."""


@dataclass
class SshHost:
    """What is known of one host's part of the job."""

    node: int
    session: Session
    group: int = 0
    """Its process group there; 0 until it was told."""
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    """What its processes carry in their environment."""
    code: int | None = None
    """Exit code of node.sh, as the host told it."""
    failed_s: float | None = None
    lost: str | None = None
    """Why its connection ended before the job did."""
    answered: int = 0
    """The last sign of life that it returned."""

    @property
    def over(self) -> bool:
        return self.code is not None or self.lost is not None

    def look(self) -> None:
        """Take what was heard."""
        while self.session.heard:
            _, word, rest = self.session.heard.popleft()
            if word == "@pgid":
                self.group = int(rest)
            elif word == "@alive":
                self.answered = int(rest)
            elif word == "@rc":
                self.code = int(rest)
        if self.session.ended and not self.over:
            self.lose(meaning("\n".join(self.session.messages))[0])
        if self.failed_s is None and (self.code or self.lost):
            self.failed_s = time.monotonic()

    def lose(self, why: str) -> None:
        """Note that the connection is of no use any more, and end its ssh."""
        self.lost = self.lost or why
        self.session.kill()


@dataclass
class SshRun(Handle):
    """A started job on several hosts."""

    fanout: Fanout
    hosts: list[SshHost]
    settings: SshSettings
    sockets: Path
    deadline: float | None = None
    _signs: dict[int, float] = field(default_factory=dict[int, float])
    """When each sign of life was sent, while some host has not returned it."""
    _number: int = 0
    _looked_s: float = field(default_factory=time.monotonic)
    _question: int | None = None
    """The sign of life that was sent when the first host had failed."""
    _hung_up_s: float = math.inf
    """Since when the hosts end the job because they were told to."""
    _closed: bool = False

    @property
    def timed_out(self) -> bool:
        """True when the job's time limit has passed."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def poll(self) -> int | None:
        """The exit code when the job has ended on all hosts, else None."""
        if self._closed:
            return self._code()
        self._look()
        if self._failure_is_clear() or all(host.session.ended for host in self.hosts):
            return self.stop()
        return None

    def stop(self) -> int:
        """End every process of the job on every host; the exit code."""
        if self._closed:
            return self._code()
        try:
            self._hang_up()
            self._end_by_group()
        finally:
            self.close()
        return self._code()

    def sweep(self) -> None:
        """End the connections; what the job left behind each host has ended itself."""
        self.close()

    def verdict(self) -> JobEnd | None:
        """The hosts whose connection was lost, or the one whose ranks could not be started."""
        lost = [host for host in self.hosts if host.lost]
        if lost:
            names = tuple(host.session.host for host in lost)
            whys = "; ".join(dict.fromkeys(host.lost or "" for host in lost))
            who = compress(names)
            if len(lost) == len(self.hosts) > 1:
                who += " (all hosts: see this machine's own network first)"
            return JobEnd("failed", f"{who}: the connection was lost: {whys}", names)
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

    def _look(self) -> None:
        """Hear every host, send a sign of life when it is time, and find those that return none."""
        now = time.monotonic()
        pause_s, self._looked_s = now - self._looked_s, now
        if pause_s > SLACK_S:  # this process was stopped itself: nobody is late for that
            self._signs = {number: at + pause_s for number, at in self._signs.items()}
        for _ in range(ROUNDS):
            if not self.fanout.step(0):
                break
        for host in self.hosts:
            host.look()
        if now - max(self._signs.values(), default=0.0) >= self.settings.alive_interval_s:
            self._send_sign(now)
        limit_s = SIGNS_MISSED * self.settings.alive_interval_s + SLACK_S
        for host in self.hosts:
            waits_s = now - self._signs.get(host.answered + 1, now)
            if not host.over and waits_s > limit_s:
                host.lose(f"no sign of life for {waits_s:.0f} s")

    def _send_sign(self, now: float) -> None:
        self._number += 1
        self._signs[self._number] = now
        running = [host for host in self.hosts if not host.over]
        oldest = min((host.answered for host in running), default=self._number)
        self._signs = {n: at for n, at in self._signs.items() if n > oldest}
        for host in running:
            host.session.send(f"{self._number}\n")
            host.session.write()

    def _failure_is_clear(self) -> bool:
        """Whether a host has failed, the others had their say, and each is either alive or lost."""
        failures = [host.failed_s for host in self.hosts if host.failed_s is not None]
        if not failures or all(host.over for host in self.hosts):
            return False
        if self._question is None:
            self._send_sign(time.monotonic())
            self._question = self._number
        answered = all(host.over or host.answered >= self._question for host in self.hosts)
        return answered and time.monotonic() - min(failures) > FOLLOW_S

    def _hang_up(self) -> None:
        """End the first connections, and wait until the hosts say that the job has ended there."""
        self._hung_up_s = time.monotonic()
        for host in self.hosts:
            host.session.hang_up()
        deadline = time.monotonic() + CONFIRM_S
        while time.monotonic() < deadline and not all(h.session.ended for h in self.hosts):
            self.fanout.step(0.05)
            for host in self.hosts:
                host.look()

    def _end_by_group(self) -> None:
        """End by their groups, through second connections, the jobs whose end was not confirmed.

        They share the first connection of a host that still answered; where that leads to nothing,
        and on all other hosts, they are new ones.
        """
        left = [host for host in self.hosts if host.code is None]
        for host in left:
            host.lost = host.lost or "it did not confirm the end of its ranks"
        left = self._still_left([host for host in left if self._answered(host)], shared=True) + [
            host for host in left if not self._answered(host)
        ]
        for host in left:
            host.session.kill()
        self._still_left(left, shared=False)

    def _answered(self, host: SshHost) -> bool:
        """Whether the host had returned the signs of life when it was told to end."""
        sent_s = self._signs.get(host.answered + 1, self._hung_up_s)
        late_s = self._hung_up_s - sent_s
        return not host.session.ended and late_s < self.settings.alive_interval_s

    def _still_left(self, hosts: list[SshHost], shared: bool) -> list[SshHost]:
        """Those of `hosts` that did not end their ranks when a second connection told them to."""
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
        return [host for host, ender in zip(hosts, enders, strict=True) if not ender.heard]

    def _code(self) -> int:
        first = self._first_failure()
        if first is not None:
            return LOST_CODE if first.code is None else first.code
        ended = next((host.code for host in self.hosts if host.code), None)
        return ended or (0 if all(host.code == 0 for host in self.hosts) else LOST_CODE)

    def _first_failure(self) -> SshHost | None:
        """The host that failed first by itself."""
        failed = [h for h in self.hosts if h.failed_s is not None and h.failed_s < self._hung_up_s]
        return min(failed, key=lambda host: host.failed_s or 0.0, default=None)
