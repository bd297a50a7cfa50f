"""Checks that every host must pass before a job starts there, run on all hosts at once."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import SshSettings
from paceline.core.hosts import compress
from paceline.core.units import pluralize, si
from paceline.core.value import Value
from paceline.files.documents import write_text
from paceline.machines.ssh import remote
from paceline.machines.ssh.connection import meaning, ssh_argv
from paceline.machines.ssh.session import Fanout, Heard, Session, allow_files

MAX_SKEW_S = 1.0
"""Maximum clock skew in seconds; beyond it, timestamps of several hosts cannot be compared."""
MIN_OPEN_FILES = 1024
OPEN_FILES_PER_RANK = 4
"""Open files per rank of the world: every rank may hold connections to every other one, in several
groups."""
MIN_FREE_BYTES = 64e6


class HostCheck(Value):
    """Facts about one host and the result of its check; None where unknown."""

    host: str
    fault: str | None = None
    """Reason why no job can run on the host."""
    answered: bool = True
    """False if no session could be opened on the host."""
    remedy: str | None = None
    round_trip_s: float | None = None
    clock_skew_s: float | None = None
    """Host clock minus this machine's clock in seconds, accurate to half a round trip."""
    python: str | None = None
    torch: str | None = None
    open_files: int | None = None
    folder: str | None = None
    """State of the run folder on the host: shared, missing, another, read-only."""
    free_bytes: int | None = None
    """Free space in bytes in the run folder."""
    temporary: str | None = None
    temporary_free_bytes: int | None = None
    address: str | None = None
    """Address of the requested network interface."""
    peer_address: str | None = None
    """Address that the host resolves the first host's name to."""
    own_address: str | None = None
    """Address that the host resolves its own name to."""
    reached_on: str | None = None
    """Network interface through which the host was reached."""
    server_address: str | None = None
    """Address at which the host was reached."""
    interfaces: tuple[str, ...] = ()
    machine: str | None = None
    """Boot id of the kernel and the host's own name. Together they identify a machine."""
    addresses: tuple[str, ...] = ()
    """IPv4 addresses of all its interfaces except loopback."""

    @property
    def on_loopback(self) -> bool:
        """True if the host was reached without a network, as through tunnels and in tests."""
        return self.server_address is None or is_loopback(self.server_address)


@dataclass(frozen=True)
class Questions:
    """Requirements that the hosts are checked for."""

    python: str
    folder: Path | None = None
    """Folder that all hosts must share with this machine."""
    interface: str | None = None
    world_size: int = 1


def judged(checks: Sequence[HostCheck], questions: Questions) -> tuple[HostCheck, ...]:
    """Return the checks, each with the first rule that its host violates."""
    usual = {name: _usual(checks, name) for name in ("python", "torch")}
    return _twins_named([_judge(check, usual, questions) for check in checks])


def _twins_named(checks: Sequence[HostCheck]) -> tuple[HostCheck, ...]:
    """Return the checks, with a fault for each host that is the same machine as an earlier one.

    A machine has one boot id, one name of its own and one set of addresses. Virtual hosts on one
    kernel differ in name or addresses. If both hosts were reached by loopback, the facts do not
    show whether they are the same machine.
    """
    first: dict[tuple[str | None, tuple[str, ...]], HostCheck] = {}
    named: list[HostCheck] = []
    for check in checks:
        twin = first.setdefault((check.machine, check.addresses), check)
        known = check.machine and check.addresses
        if twin is check or not known or check.fault or (check.on_loopback and twin.on_loopback):
            named.append(check)
            continue
        name = (check.machine or "").rpartition(" ")[2]
        fault = f"is the same machine as {twin.host}: {name} at {', '.join(check.addresses)}"
        remedy = "name every machine once"
        named.append(check.model_copy(update={"fault": fault, "remedy": remedy}))
    return tuple(named)


def _judge(check: HostCheck, usual: Mapping[str, str | None], questions: Questions) -> HostCheck:
    if check.fault:
        return check
    for rule in (_clock, _open_files, _folder, _disk, _interface):
        if breach := rule(check, questions):
            return check.model_copy(update={"fault": breach[0], "remedy": breach[1]})
    for name, version in usual.items():
        host_version = getattr(check, name)
        if host_version != version:
            fault = f"has {name} {host_version or 'missing'}, most hosts {version or 'none'}"
            return check.model_copy(
                update={"fault": fault, "remedy": "install the same versions everywhere"}
            )
    return check


Rule = Callable[[HostCheck, Questions], tuple[str, str] | None]


def _clock(check: HostCheck, _: Questions) -> tuple[str, str] | None:
    skew_s, trip_s = check.clock_skew_s, check.round_trip_s
    if skew_s is None or trip_s is None or abs(skew_s) - trip_s / 2 <= MAX_SKEW_S:
        return None
    direction = "ahead" if skew_s > 0 else "behind"
    return (
        f"its clock is {abs(skew_s):.1f} s {direction} (at most {MAX_SKEW_S:g} s)",
        "let NTP or chrony set the clocks",
    )


def _open_files(check: HostCheck, questions: Questions) -> tuple[str, str] | None:
    needed = max(MIN_OPEN_FILES, OPEN_FILES_PER_RANK * questions.world_size)
    if check.open_files is None or check.open_files < 0 or check.open_files >= needed:
        return None
    return (
        f"allows {check.open_files} open files (at least {needed})",
        "raise nofile in /etc/security/limits.conf",
    )


def _folder(check: HostCheck, questions: Questions) -> tuple[str, str] | None:
    if not questions.folder or check.folder == "shared":
        return None
    state = {
        "read-only": "cannot write to",
        "another": "sees other files in",
    }.get(check.folder or "", "does not see")
    return (
        f"{state} {questions.folder}",
        "put the runs on a folder that all hosts share (--runs-dir)",
    )


def _disk(check: HostCheck, questions: Questions) -> tuple[str, str] | None:
    places = (
        (questions.folder, check.free_bytes),
        (check.temporary, check.temporary_free_bytes),
    )
    for place, free in places:
        if free is not None and free < MIN_FREE_BYTES:
            least = si(MIN_FREE_BYTES, "B")
            return f"has {si(free, 'B')} free in {place} (at least {least})", "free some disk"
    return None


def _interface(check: HostCheck, questions: Questions) -> tuple[str, str] | None:
    if not questions.interface or check.address:
        return None
    others = ", ".join(check.interfaces) or "none"
    return (
        f"has no address on {questions.interface} (its interfaces: {others})",
        "choose one that all hosts have (--interface)",
    )


def _usual(checks: Sequence[HostCheck], name: str) -> str | None:
    """Return the version that most hosts have."""
    counts = Counter(getattr(check, name) for check in checks if check.python)
    return counts.most_common(1)[0][0] if counts else None


def is_loopback(address: str | None) -> bool:
    """Return True if an address leads to the host itself only."""
    return address is not None and ip_address(address.partition("%")[0]).is_loopback


def raise_for_faults(checks: Sequence[HostCheck]) -> None:
    """Raise one SystemFaultError that names every host at fault, if there is any."""
    faults: dict[tuple[str, str | None], list[str]] = {}
    for check in checks:
        if check.fault:
            faults.setdefault((check.fault, check.remedy), []).append(check.host)
    if not faults:
        return
    at_fault = [host for hosts in faults.values() for host in hosts]
    remedies = list(dict.fromkeys(remedy for _, remedy in faults if remedy))
    whats = [f"{compress(hosts)} {what}" for (what, _), hosts in faults.items()]
    alone = len(faults) == 1
    raise SystemFaultError(
        compress(at_fault) if alone else f"{len(at_fault):,} of {pluralize(len(checks), 'host')}",
        next(iter(faults))[0] if alone else ", ".join(whats),
        remedy="; ".join(remedies) or None,
        hosts=at_fault,
    )


CLOCK_QUESTIONS = 3
ANSWER_LIMIT_S = 60.0
"""Time in seconds that a connected host has to answer; its interpreter may be on a slow file
system."""
LATE_S = 1.0
"""Time in seconds that a connection has beyond ssh's own limit, so that ssh can report why it
failed."""
_NUMBER = re.compile(r"\d+(\.\d+)?")
SLOW = "see what its shell does at log-in and what its interpreter waits for"


@dataclass
class _Examination:
    """The questions to one host, and its answers."""

    session: Session
    first: str
    questions: Questions
    settings: SshSettings
    nonce: str = ""
    asked_s: float = 0.0
    server: str = ""
    clock: list[tuple[float, float | None]] = field(
        default_factory=list[tuple[float, float | None]]
    )
    """Round trip and skew of each question in seconds; no skew if the host reported no time."""
    facts: dict[str, Any] | None = None
    unable: str | None = None
    late: str | None = None

    @property
    def done(self) -> bool:
        answer = self.facts or self.unable or self.late
        return answer is not None or (self.session.ended and not self.session.heard)

    def look(self) -> None:
        """Process received messages, send the next question, and give up on a timeout."""
        while self.session.heard and not self.done:
            self._take(self.session.heard.popleft())
        started_s = self.session.started_s
        if self.done or started_s is None:
            self.session.settled = self.done
            return
        limit_s = self.settings.connect_timeout_s
        if not self.asked_s and time.monotonic() - started_s > limit_s + LATE_S:
            self.late = f"its log-in did not end within {limit_s:g} s"
        elif self.asked_s and time.monotonic() - self.asked_s > ANSWER_LIMIT_S:
            self.late = f"did not answer the checks within {ANSWER_LIMIT_S:g} s"
        if self.late:
            self.session.kill()

    def _take(self, heard: Heard) -> None:
        if heard.word == "@ready":
            self.server = _address(heard.rest.strip())
            self._ask(remote.tell_time())
        elif heard.word == "@clock":
            self._take_clock(heard)
            more = len(self.clock) < CLOCK_QUESTIONS
            self._ask(remote.tell_time() if more else self._facts_question())
        elif heard.word == "@facts":
            self._take_facts(heard.rest)
        elif heard.word == "@unable":
            self.unable = heard.rest or "said nothing"

    def _take_facts(self, text: str) -> None:
        try:
            self.facts = json.loads(text)
        except ValueError:
            self.unable = text

    def _ask(self, text: str) -> None:
        self.session.send(text)
        self.session.write()
        self.asked_s = time.monotonic()

    def _facts_question(self) -> str:
        questions = self.questions
        folder = str(questions.folder) if questions.folder else ""
        words = (folder, self.nonce, questions.interface or "", self.first, self.server)
        return remote.ask(questions.python, "facts", *words)

    def _take_clock(self, heard: Heard) -> None:
        """Add the host's clock minus this one's at the middle of the round trip.

        Source: Cristian's method.
        """
        trip_s = heard.at_s - self.asked_s
        # The wall clock when the answer arrived, moved back by half the round trip.
        middle_unix = time.time() - (time.monotonic() - heard.at_s) - trip_s / 2
        match = _NUMBER.match(heard.rest)  # a `date` without %N prints the letter after the dot
        skew_s = float(match[0]) - middle_unix if match else None
        self.clock.append((trip_s, skew_s))


def examine(fanout: Fanout, questions: Questions, settings: SshSettings) -> tuple[HostCheck, ...]:
    """Check every host of `fanout`; the sessions of hosts that answer stay open."""
    nonce = f".paceline-{secrets.token_hex(8)}={secrets.token_hex(16)}" if questions.folder else ""
    first = fanout.sessions[0].host
    examinations = [_Examination(s, first, questions, settings, nonce) for s in fanout.sessions]
    file, _, content = nonce.partition("=")
    if questions.folder:
        write_text(questions.folder / file, content)
    try:
        while not all(examination.done for examination in examinations):
            fanout.step(0.05)
            for examination in examinations:
                examination.look()
    finally:
        if questions.folder:
            (questions.folder / file).unlink(missing_ok=True)
    return judged([_host_check(examination) for examination in examinations], questions)


def check_hosts(
    hosts: Sequence[str],
    questions: Questions,
    settings: SshSettings,
    env: Mapping[str, str] | None = None,
) -> tuple[HostCheck, ...]:
    """Return the check of each host, in order, with its fault if a job would fail there."""
    allow_files(len(hosts))
    sessions = [Session(host, ssh_argv(host, settings)) for host in hosts]
    for session in sessions:
        session.send(remote.greeting(env or {}))
    fanout = Fanout(sessions)
    try:
        return examine(fanout, questions, settings)
    finally:
        fanout.close()


def _address(text: str) -> str:
    """Return an address, empty if sshd reports none.

    sshd reports `UNKNOWN` if the host was reached without a network.
    """
    try:
        return str(ip_address(text))
    except ValueError:
        return ""


def _host_check(examination: _Examination) -> HostCheck:
    host = examination.session.host
    if examination.late:
        return HostCheck(host=host, fault=examination.late, answered=False, remedy=SLOW)
    if examination.unable:
        python = os.fspath(examination.questions.python)
        return HostCheck(
            host=host,
            fault=f"cannot run {python}: {examination.unable[:200]}",
            remedy="install it at the same path, or name another interpreter (cluster.python)",
        )
    if examination.facts is None:
        what, remedy = meaning("\n".join(examination.session.messages))
        return HostCheck(host=host, fault=what, answered=False, remedy=remedy)
    # The shortest round trip bounds the error of the skew most tightly.
    trip_s, skew_s = min(examination.clock, key=lambda reading: reading[0])
    facts = {**examination.facts, "round_trip_s": trip_s, "clock_skew_s": skew_s}
    return HostCheck(host=host, server_address=examination.server or None, **facts)
