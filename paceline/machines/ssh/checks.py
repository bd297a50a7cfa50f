"""Checks that every host must pass before a job starts there, run on all hosts at once."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from pydantic import ValidationError

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import SshSettings
from paceline.core.hosts import compress
from paceline.core.units import pluralize, si
from paceline.core.value import Value
from paceline.files.documents import write_text
from paceline.machines.ssh import remote
from paceline.machines.ssh.connection import explain, ssh_argv
from paceline.machines.ssh.session import Fanout, Message, Session, allow_files

MAX_SKEW_S = 1.0
"""Maximum clock skew in seconds; beyond it, timestamps of several hosts cannot be compared."""
MIN_OPEN_FILES = 1024
OPEN_FILES_PER_RANK = 4
"""Open files per rank of the world: every rank may hold connections to every other one, in several
groups."""
MIN_FREE_BYTES = 64e6


class HostFacts(Value):
    """Facts that the program on a host reports about it; None where unknown."""

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
    interfaces: tuple[str, ...] = ()
    machine: str | None = None
    """Boot id of the kernel and the host's own name. Together they identify a machine."""
    addresses: tuple[str, ...] = ()
    """IPv4 addresses of all its interfaces except loopback."""


class HostCheck(HostFacts):
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
    server_address: str | None = None
    """Address at which the host was reached."""

    @property
    def on_loopback(self) -> bool:
        """True if the host was reached without a network, as through tunnels and in tests."""
        return self.server_address is None or is_loopback(self.server_address)


@dataclass(frozen=True)
class HostRequirements:
    """Requirements that the hosts are checked for."""

    python: str
    folder: Path | None = None
    """Folder that all hosts must share with this machine."""
    interface: str | None = None
    world_size: int = 1


def apply_rules(
    checks: Sequence[HostCheck], requirements: HostRequirements
) -> tuple[HostCheck, ...]:
    """Return the checks, each with the first rule that its host violates."""
    versions = {name: _most_common(checks, name) for name in ("python", "torch")}
    return _mark_duplicates([_apply_rules_to(check, versions, requirements) for check in checks])


def _mark_duplicates(checks: Sequence[HostCheck]) -> tuple[HostCheck, ...]:
    """Return the checks, with a fault for each host that is the same machine as an earlier one.

    A machine has one boot id, one name of its own and one set of addresses. Virtual hosts on one
    kernel differ in name or addresses. If both hosts were reached by loopback, the facts do not
    show whether they are the same machine.
    """
    first: dict[tuple[str | None, tuple[str, ...]], HostCheck] = {}
    results: list[HostCheck] = []
    for check in checks:
        earlier = first.setdefault((check.machine, check.addresses), check)
        is_identified = check.machine and check.addresses
        if (
            earlier is check
            or not is_identified
            or check.fault
            or (check.on_loopback and earlier.on_loopback)
        ):
            results.append(check)
            continue
        name = (check.machine or "").rpartition(" ")[2]
        fault = f"is the same machine as {earlier.host}: {name} at {', '.join(check.addresses)}"
        remedy = "list each machine once"
        results.append(check.model_copy(update={"fault": fault, "remedy": remedy}))
    return tuple(results)


def _apply_rules_to(
    check: HostCheck, versions: Mapping[str, str | None], requirements: HostRequirements
) -> HostCheck:
    if check.fault:
        return check
    for rule in (_clock, _open_files, _folder, _disk, _interface):
        if breach := rule(check, requirements):
            return check.model_copy(update={"fault": breach[0], "remedy": breach[1]})
    for name, version in versions.items():
        host_version = getattr(check, name)
        if host_version != version:
            fault = f"has {name} {host_version or 'missing'}, most hosts have {version or 'none'}"
            return check.model_copy(
                update={"fault": fault, "remedy": "install the same versions everywhere"}
            )
    return check


Rule = Callable[[HostCheck, HostRequirements], tuple[str, str] | None]


def _clock(check: HostCheck, _: HostRequirements) -> tuple[str, str] | None:
    skew_s, trip_s = check.clock_skew_s, check.round_trip_s
    if skew_s is None or trip_s is None or abs(skew_s) - trip_s / 2 <= MAX_SKEW_S:
        return None
    direction = "ahead" if skew_s > 0 else "behind"
    return (
        f"its clock is {abs(skew_s):.1f} s {direction} (at most {MAX_SKEW_S:g} s)",
        "let NTP or chrony set the clocks",
    )


def _open_files(check: HostCheck, requirements: HostRequirements) -> tuple[str, str] | None:
    min_files = max(MIN_OPEN_FILES, OPEN_FILES_PER_RANK * requirements.world_size)
    if check.open_files is None or check.open_files < 0 or check.open_files >= min_files:
        return None
    return (
        f"allows {check.open_files} open files (at least {min_files})",
        "raise nofile in /etc/security/limits.conf",
    )


def _folder(check: HostCheck, requirements: HostRequirements) -> tuple[str, str] | None:
    if not requirements.folder or check.folder == "shared":
        return None
    state = {
        "read-only": "cannot write to",
        "another": "sees other files in",
    }.get(check.folder or "", "does not see")
    return (
        f"{state} {requirements.folder}",
        "use a run folder that all hosts share (--runs-dir)",
    )


def _disk(check: HostCheck, requirements: HostRequirements) -> tuple[str, str] | None:
    places = (
        (requirements.folder, check.free_bytes),
        (check.temporary, check.temporary_free_bytes),
    )
    for place, free in places:
        if free is not None and free < MIN_FREE_BYTES:
            least = si(MIN_FREE_BYTES, "B")
            return f"has {si(free, 'B')} free in {place} (at least {least})", "free disk space"
    return None


def _interface(check: HostCheck, requirements: HostRequirements) -> tuple[str, str] | None:
    if not requirements.interface or check.address:
        return None
    others = ", ".join(check.interfaces) or "none"
    return (
        f"has no address on {requirements.interface} (its interfaces: {others})",
        "choose one that all hosts have (--interface)",
    )


def _most_common(checks: Sequence[HostCheck], name: str) -> str | None:
    """Return the version that most hosts have."""
    counts = Counter(getattr(check, name) for check in checks if check.python)
    return counts.most_common(1)[0][0] if counts else None


def is_loopback(address: str | None) -> bool:
    """Return True if an address leads to the host itself only."""
    plain = _address((address or "").partition("%")[0])
    return bool(plain) and ip_address(plain).is_loopback


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


CLOCK_SAMPLES = 3
ANSWER_LIMIT_S = 60.0
"""Time in seconds that a connected host has to answer; its interpreter may be on a slow file
system."""
LATE_S = 1.0
"""Time in seconds that a connection has beyond ssh's own limit, so that ssh can report why it
failed."""
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]+)?")
SLOW_REMEDY = "check what its login shell does and what its interpreter waits for"


@dataclass
class _Examination:
    """The questions to one host, and its answers."""

    session: Session
    first: str
    requirements: HostRequirements
    settings: SshSettings
    nonce: str = ""
    asked_s: float = 0.0
    server: str = ""
    clock: list[tuple[float, float | None]] = field(
        default_factory=list[tuple[float, float | None]]
    )
    """Round trip and skew of each question in seconds; no skew if the host reported no time."""
    facts: HostFacts | None = None
    failure: str | None = None
    timeout_reason: str | None = None

    @property
    def done(self) -> bool:
        answers = (self.facts, self.failure, self.timeout_reason)
        return any(answer is not None for answer in answers) or (
            self.session.ended and not self.session.inbox
        )

    def update(self) -> None:
        """Process received messages, send the next question, and give up on a timeout."""
        while self.session.inbox and not self.done:
            self._handle(self.session.inbox.popleft())
        started_s = self.session.started_s
        if self.done or started_s is None:
            self.session.settled = self.done
            return
        limit_s = self.settings.connect_timeout_s
        if not self.asked_s and time.monotonic() - started_s > limit_s + LATE_S:
            self.timeout_reason = f"its login did not finish within {limit_s:g} s"
        elif self.asked_s and time.monotonic() - self.asked_s > ANSWER_LIMIT_S:
            self.timeout_reason = f"did not answer the checks within {ANSWER_LIMIT_S:g} s"
        if self.timeout_reason:
            self.session.kill()

    def _handle(self, message: Message) -> None:
        if message.word == "@ready":
            self.server = _address(message.text.strip())
            self._ask(remote.request_time())
        elif message.word == "@clock":
            self._handle_clock(message)
            more = len(self.clock) < CLOCK_SAMPLES
            self._ask(remote.request_time() if more else self._facts_request())
        elif message.word == "@facts":
            self._handle_facts(message.text)
        elif message.word == "@unable":
            self.failure = message.text or "no output"

    def _handle_facts(self, text: str) -> None:
        try:
            self.facts = HostFacts.model_validate_json(text)
        except ValidationError:
            self.failure = text

    def _ask(self, text: str) -> None:
        self.session.send(text)
        self.session.write()
        self.asked_s = time.monotonic()

    def _facts_request(self) -> str:
        requirements = self.requirements
        folder = str(requirements.folder) if requirements.folder else ""
        words = (folder, self.nonce, requirements.interface or "", self.first, self.server)
        return remote.request_facts(requirements.python, "facts", *words)

    def _handle_clock(self, message: Message) -> None:
        """Add the host's clock minus this one's at the middle of the round trip.

        Source: Cristian's method.
        """
        trip_s = message.at_s - self.asked_s
        # The wall clock when the answer arrived, moved back by half the round trip.
        middle_unix = time.time() - (time.monotonic() - message.at_s) - trip_s / 2
        match = _NUMBER.match(message.text)  # a `date` without %N prints the letter after the dot
        skew_s = float(match[0]) - middle_unix if match else None
        self.clock.append((trip_s, skew_s))


def examine(
    fanout: Fanout, requirements: HostRequirements, settings: SshSettings
) -> tuple[HostCheck, ...]:
    """Check every host of `fanout`; the sessions of hosts that answer stay open."""
    nonce = (
        f".paceline-{secrets.token_hex(8)}={secrets.token_hex(16)}" if requirements.folder else ""
    )
    first = fanout.sessions[0].host
    examinations = [_Examination(s, first, requirements, settings, nonce) for s in fanout.sessions]
    file, _, content = nonce.partition("=")
    if requirements.folder:
        write_text(requirements.folder / file, content)
    try:
        while not all(examination.done for examination in examinations):
            fanout.step(0.05)
            for examination in examinations:
                examination.update()
    finally:
        if requirements.folder:
            (requirements.folder / file).unlink(missing_ok=True)
    return apply_rules([_host_check(examination) for examination in examinations], requirements)


def check_hosts(
    hosts: Sequence[str],
    requirements: HostRequirements,
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
        return examine(fanout, requirements, settings)
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
    if examination.timeout_reason:
        why = examination.timeout_reason
        return HostCheck(host=host, fault=why, answered=False, remedy=SLOW_REMEDY)
    if examination.failure:
        python = os.fspath(examination.requirements.python)
        return HostCheck(
            host=host,
            fault=f"cannot run {python}: {examination.failure[:200]}",
            remedy="install it at the same path, or set another interpreter (cluster.python)",
        )
    if examination.facts is None:
        what, remedy = explain("\n".join(examination.session.messages))
        return HostCheck(host=host, fault=what, answered=False, remedy=remedy)
    # The shortest round trip bounds the error of the skew most tightly.
    trip_s, skew_s = min(examination.clock, key=lambda reading: reading[0], default=(None, None))
    return HostCheck(
        host=host,
        round_trip_s=trip_s,
        clock_skew_s=skew_s,
        server_address=examination.server or None,
        **dict(examination.facts),
    )
