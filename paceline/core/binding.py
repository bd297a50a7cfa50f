"""CPU binding of ranks: bind files, and warnings about the cores that ranks report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.core.errors import UserError
from paceline.core.hosts import compress
from paceline.core.units import pluralize

CORE_RANGE = re.compile(r"\d{1,5}(-\d{1,5})?")
DEVICE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,31}")


@dataclass(frozen=True)
class Place:
    """The host and the cores of one rank, as the rank reports them."""

    rank: int
    host: str
    cores: str | None
    """Hardware threads available to the rank, such as `0-3,8`; None if the system does not report
    them."""
    threads: int | None = None
    bound_by: str | None = None
    """Source of the binding: cpu, cuda or file; None if the rank is not bound."""
    requested: bool = False
    """True if binding was requested."""
    why: str | None = None
    """Reason why the rank is not bound although binding was requested."""
    host_cores: str | None = None
    """Hardware threads that the rank could use without binding."""
    numa_nodes: int | None = None


def core_numbers(text: str, where: str = "cores") -> set[int]:
    """Return the numbers of a list such as `0-3,8`; raise UserError for an invalid list."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not CORE_RANGE.fullmatch(part) or int(last or first) < int(first):
            raise UserError(where, f"{text!r} is not a list of cores", allowed="0-3,8")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def parse_bind_file(text: str, where: str) -> list[dict[str, str | None]]:
    """Parse lines `LOCAL_RANK CORES [NIC]`; return one entry per local rank, in rank order.

    Raises UserError with the line number for an invalid line or a duplicate rank, and with the
    rank's number for a missing rank.
    """
    entries: dict[int, dict[str, str | None]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"{where}:{number}"
        if len(words) not in (2, 3) or not words[0].isdecimal():
            raise UserError(place, f"{line.strip()!r} is unknown", allowed="LOCAL_RANK CORES [NIC]")
        rank, cores, nic = int(words[0]), words[1], words[2] if len(words) == 3 else None
        if rank in entries:
            raise UserError(place, f"local rank {rank} is listed twice")
        if nic is not None and not DEVICE_NAME.fullmatch(nic):
            raise UserError(place, f"{nic!r} is not a network device")
        core_numbers(cores, place)
        entries[rank] = {"cores": cores, "nic": nic}
    missing = next((rank for rank in range(len(entries)) if rank not in entries), None)
    if missing is not None or not entries:
        raise UserError(where, f"has no cores for local rank {missing or 0}")
    return [entries[rank] for rank in range(len(entries))]


def _by_host(places: Sequence[Place]) -> dict[str, list[Place]]:
    """Return the ranks with known cores of each host, sorted by host."""
    hosts: dict[str, list[Place]] = {}
    for place in places:
        if place.cores is not None:
            hosts.setdefault(place.host, []).append(place)
    return dict(sorted(hosts.items()))


def binding_warnings(places: Sequence[Place]) -> list[str]:
    """Return one warning per kind of binding problem that lets ranks disturb each other."""
    warnings, hosts = list[str](), _by_host(places)
    failed = [place for place in places if place.requested and place.bound_by is None]
    if failed:
        ranks = ", ".join(str(place.rank) for place in failed[:8])
        who = f"rank {ranks} was" if len(failed) == 1 else f"ranks {ranks} were"
        warnings.append(
            f"{who} not bound although binding was requested: {failed[0].why or 'unknown reason'}"
        )
    faults = [
        (_shared_cores, "cores are used by several bound ranks"),
        (_surplus_threads, "have more threads than cores; the ranks disturb each other"),
        (
            _unbound_ranks,
            "run unbound ranks over several NUMA nodes; --bind auto keeps each near its device",
        ),
        (_idle_cores, "have cores that no bound rank uses"),
    ]
    for fault_of, sentence in faults:
        faults_by_host = {host: text for host, ranks in hosts.items() if (text := fault_of(ranks))}
        if faults_by_host:
            first = next(iter(faults_by_host))
            warnings.append(
                f"{compress(list(faults_by_host))} {sentence} ({first}: {faults_by_host[first]})"
            )
    return warnings


def oversubscription(places: Sequence[Place]) -> str | None:
    """Return how ranks of a host share cores or lack cores for their threads, else None."""
    for host, ranks in _by_host(places).items():
        if shared := _shared_cores(ranks):
            return f"{host}: bound ranks share {shared}"
        if surplus := _surplus_threads(ranks):
            return f"{host}: {surplus}"
    return None


def _shared_cores(ranks: Iterable[Place]) -> str | None:
    used: set[int] = set()
    twice: set[int] = set()
    for place in ranks:
        if place.bound_by is not None:
            cores = core_numbers(place.cores or "")
            twice |= used & cores
            used |= cores
    return f"{len(twice)} of them, core {min(twice)} first" if twice else None


def _surplus_threads(ranks: Iterable[Place]) -> str | None:
    places = list(ranks)
    threads = sum(place.threads or 1 for place in places)
    cores = set[int]().union(*(core_numbers(place.cores or "") for place in places))
    if threads <= len(cores):
        return None
    return f"{pluralize(threads, 'thread')} on {pluralize(len(cores), 'core')}"


def _unbound_ranks(ranks: Iterable[Place]) -> str | None:
    loose = [place for place in ranks if place.bound_by is None and (place.numa_nodes or 1) > 1]
    return f"{len(loose)} ranks, {loose[0].numa_nodes} NUMA nodes" if len(loose) > 1 else None


def _idle_cores(ranks: Iterable[Place]) -> str | None:
    places = list(ranks)
    if any(place.bound_by is None or place.host_cores is None for place in places):
        return None
    used = set[int]().union(*(core_numbers(place.cores or "") for place in places))
    free = core_numbers(places[0].host_cores or "") - used
    return f"{len(free)} of {len(free) + len(used)}" if free else None
