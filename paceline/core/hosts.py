"""Host names: validation, ranges such as `node[001-064]`, and hostfiles.

Host names become part of scripts, argument lists and file names. Names that a shell, ssh or a path
could misinterpret are refused before anything starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import IPv6Address

from paceline.core.errors import UserError
from paceline.core.value import Value

MAX_HOSTS = 100_000
"""Maximum number of hosts in one text. A longer range is most likely a typing error."""

MAX_RANGES = 8
"""Maximum number of ranges in one name, such as rack, shelf and node."""
MAX_SHOWN_CHARS = 60

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_IPV6 = re.compile(r"\[?([0-9A-Fa-f:.]{2,45})\]?")
_RANGE = re.compile(r"([^\[\]]*)\[([0-9,-]+)\](.*)", re.DOTALL)
_NUMBERS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_COMMA = re.compile(r",(?![^\[]*\])")
"""Comma between names, but not inside brackets."""
_SLOTS = re.compile(r"(?:slots|max_slots)=([0-9]{1,9})|:([0-9]{1,9})$")
_TAIL = re.compile(r"(.*?)(\d{1,9})$")


class Host(Value):
    """One line of a hostfile."""

    name: str
    slots: int | None = None
    """Number of devices; None if the file does not state it."""


def check_name(name: str, where: str = "host") -> str:
    """Return `name`, with an IPv6 address in canonical form without brackets.

    Raises UserError if `name` is not a valid host name, address or SSH alias. Zones of addresses
    (`%eth0`) are refused, because they identify different hosts on different machines.
    """
    if _NAME.fullmatch(name):
        return name
    if (match := _IPV6.fullmatch(name)) and name.startswith("[") == name.endswith("]"):
        with suppress(ValueError):
            return IPv6Address(match[1]).compressed
    raise UserError(
        where,
        f"{name!r} is not a host name",
        allowed="letters, digits, . _ -, a range (node[001-004]) or an IPv6 address (fd00::5)",
    )


def first_repeated(names: Iterable[str]) -> str | None:
    """Return the first duplicate name, ignoring case; None if there is none."""
    previous: set[str] = set()
    for name in names:
        if name.casefold() in previous:
            return name
        previous.add(name.casefold())
    return None


def expand(text: str, where: str = "hosts") -> list[str]:
    """Expand a list such as `node[001-003,7],gpu-a` into host names, in order.

    Raises UserError for invalid names and ranges.
    """
    names: list[str] = []
    for part in filter(None, map(str.strip, _COMMA.split(text))):
        names += _expand_ranges(part, where)
        if len(names) > MAX_HOSTS:
            raise UserError(where, "has too many hosts", allowed=f"{MAX_HOSTS} hosts")
    return [check_name(name, where) for name in names]


def compress(names: Sequence[str]) -> str:
    """Return a short text for a list of names; consecutive numbers of equal width form a range."""
    parts: list[list[tuple[str, str]]] = []
    """Names as (prefix, digits). Each inner list becomes one range."""
    for name in names:
        match = _TAIL.fullmatch(name)
        prefix, digits = match.groups() if match else (name, "")
        before, last = parts[-1][-1] if parts else ("", "")
        if digits and (before, len(last)) == (prefix, len(digits)) and int(digits) == int(last) + 1:
            parts[-1].append((prefix, digits))
        else:
            parts.append([(prefix, digits)])
    return ",".join(_range_text(part) for part in parts)


def parse_hostfile(text: str, where: str = "hostfile") -> tuple[Host, ...]:
    """Return the hosts of a hostfile.

    Supported forms are DeepSpeed (`node-1 slots=8`), MPI (`node-1:8`) and plain names. `#` starts a
    comment. A name may be a range. Raises UserError with the line number for blank lines between
    hosts, duplicate hosts, invalid names and unknown words.
    """
    line_of: dict[str, int] = {}
    hosts: list[Host] = []
    lines = text.rstrip("\n").split("\n") if text.strip() else []
    for number, line in enumerate(lines, start=1):
        place = f"{where}:{number}"
        words = line.partition("#")[0].strip()
        if not words:
            if line.strip():
                continue
            raise UserError(place, "is blank", remedy="delete the line")
        for host in _hosts_of(words, place):
            if first := line_of.get(host.name.casefold()):
                raise UserError(
                    place,
                    f"{host.name} was named in line {first} before",
                    remedy="name every host once",
                )
            line_of[host.name.casefold()] = number
            hosts.append(host)
    if not hosts:
        raise UserError(where, "names no host")
    return tuple(hosts)


def hostfile_text(hosts: Iterable[Host]) -> str:
    """Return a hostfile in DeepSpeed's form, or in plain form for hosts without known slots."""
    return "".join(
        f"{host.name} slots={host.slots}\n" if host.slots else f"{host.name}\n" for host in hosts
    )


def _hosts_of(words: str, where: str) -> list[Host]:
    name, *options = words.split()
    slots: list[int] = []
    for word in options:
        match = _SLOTS.fullmatch(word)
        if match is None or match[1] is None:
            raise UserError(where, f"{word!r} is unknown", allowed="HOST, HOST slots=N or HOST:N")
        slots += [] if word.startswith("max_") else [int(match[1])]
    # A port-like suffix counts after brackets, or if it is the only colon. Otherwise the last part
    # of an IPv6 address would be read as slots.
    ends_address = name.startswith("[") or name.count(":") == 1
    if ends_address and (match := _SLOTS.search(name)):
        name, slots = name[: match.start()], [int(match[2]), *slots]
    if 0 in slots or len(slots) > 1:
        what = "has no slots" if 0 in slots else "sets its slots twice"
        raise UserError(where, what, allowed="1 or more, once")
    return [Host(name=host, slots=slots[0] if slots else None) for host in expand(name, where)]


def _expand_ranges(text: str, where: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    if match is None:
        return [text]
    head, numbers, suffix = match.groups()
    if suffix.count("[") >= MAX_RANGES:
        raise UserError(where, "has too many ranges in one name", allowed=f"{MAX_RANGES}")
    pieces = [_ends(piece, numbers, where) for piece in numbers.split(",")]
    tails = _expand_ranges(suffix, where)
    if sum(last - first + 1 for first, last, _ in pieces) * len(tails) > MAX_HOSTS:
        raise UserError(where, f"[{_short(numbers)}] is too many", allowed=f"{MAX_HOSTS} hosts")
    middle = [str(n).zfill(width) for first, last, width in pieces for n in range(first, last + 1)]
    return [head + number + tail for number in middle for tail in tails]


def _ends(piece: str, numbers: str, where: str) -> tuple[int, int, int]:
    """Return first number, last number and number of digits of a range such as `001-064`."""
    ends = _NUMBERS.fullmatch(piece)
    first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
    if ends is None or last < first:
        raise UserError(where, f"[{_short(numbers)}] is not a range", allowed="node[001-064,70]")
    return first, last, len(ends[1])


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _range_text(part: Sequence[tuple[str, str]]) -> str:
    (prefix, low), (_, high) = part[0], part[-1]
    return f"{prefix}[{low}-{high}]" if len(part) > 1 else prefix + low
