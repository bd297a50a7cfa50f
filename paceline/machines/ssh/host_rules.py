"""What a host must be like to run a job, and the sentence for each rule that it breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from paceline.core.errors import SystemFaultError
from paceline.core.hosts import compress
from paceline.core.units import counted, si
from paceline.core.value import Value

MAX_SKEW_S = 1.0
"""Clocks that differ by more make stamps of several hosts useless."""
MIN_OPEN_FILES = 1024
OPEN_FILES_PER_RANK = 4
"""Every rank may hold connections to every other one, in several groups."""
MIN_FREE_BYTES = 64e6


class HostCheck(Value):
    """What one host told; None where it is unknown."""

    host: str
    fault: str | None = None
    """Why no job can run there."""
    remedy: str | None = None
    round_trip_s: float | None = None
    clock_skew_s: float | None = None
    """Its clock minus this machine's, known to half a round trip."""
    python: str | None = None
    torch: str | None = None
    open_files: int | None = None
    folder: str | None = None
    """How it sees the run folder: shared, missing, another, read-only."""
    free_bytes: int | None = None
    """Where the run folder lies."""
    temporary: str | None = None
    temporary_free_bytes: int | None = None
    address: str | None = None
    """Of the interface that was asked for."""
    peer_address: str | None = None
    """What it finds for the first host's name."""
    own_address: str | None = None
    """What it finds for its own name."""
    reached_on: str | None = None
    """The interface through which it was reached."""
    server_address: str | None = None
    """The address at which it was reached."""
    interfaces: tuple[str, ...] = ()
    machine: str | None = None
    """The start of its kernel and its own name, which two hosts hardly share."""
    addresses: tuple[str, ...] = ()
    """Of all its interfaces but loopback, IPv4."""

    @property
    def on_loopback(self) -> bool:
        """Whether it was reached by no network, as tunnels and tests reach hosts."""
        return self.server_address is None or is_loopback(self.server_address)


@dataclass(frozen=True)
class Questions:
    """What the hosts are asked."""

    python: str
    folder: Path | None = None
    """A folder that all of them must share with this machine."""
    interface: str | None = None
    world_size: int = 1


def judged(checks: Sequence[HostCheck], questions: Questions) -> tuple[HostCheck, ...]:
    """The checks with the first rule that each host breaks."""
    usual = {name: _usual(checks, name) for name in ("python", "torch")}
    return _twins_named([_judge(check, usual, questions) for check in checks])


def _twins_named(checks: Sequence[HostCheck]) -> tuple[HostCheck, ...]:
    """The checks, with a fault for each host that another name before it stands for as well.

    One machine has one start of its kernel, one name of its own and one set of addresses. Virtual
    hosts on one kernel differ in the others; hosts that were all reached by loopback tell nothing.
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
    """The version that most hosts have."""
    counts = Counter(getattr(check, name) for check in checks if check.python)
    return counts.most_common(1)[0][0] if counts else None


def is_loopback(address: str | None) -> bool:
    """Whether an address leads nowhere but to the host itself."""
    return address is not None and ip_address(address.partition("%")[0]).is_loopback


def raise_for_faults(checks: Sequence[HostCheck]) -> None:
    """One SystemFaultError that names every host at fault; nothing when there is none."""
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
        compress(at_fault) if alone else f"{len(at_fault):,} of {counted(len(checks), 'host')}",
        next(iter(faults))[0] if alone else ", ".join(whats),
        remedy="; ".join(remedies) or None,
        hosts=at_fault,
    )
