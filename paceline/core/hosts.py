"""Host names: which ones are safe, ranges such as `node[001-064]`, and hostfiles.

Names end up in scripts, argument lists and file names, so whatever could be read as something else
by a shell, by ssh or by a path is refused before anything starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import IPv6Address

from paceline.core.errors import UserError
from paceline.core.value import Value

MAX_HOSTS = 100_000
"""Hosts that one text may stand for; a range beyond it is a slip of the finger."""

MOST_RANGES = 8
"""Ranges in one name: a rack, a shelf, a node and a few more."""
MOST_SHOWN = 60

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_IPV6 = re.compile(r"\[?([0-9A-Fa-f:.]{2,45})\]?")
_RANGE = re.compile(r"([^\[\]]*)\[([0-9,-]+)\](.*)", re.DOTALL)
_NUMBERS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_COMMA = re.compile(r",(?![^\[]*\])")
"""Between names, not inside brackets."""
_SLOTS = re.compile(r"(?:slots|max_slots)=([0-9]{1,9})|:([0-9]{1,9})$")
_TAIL = re.compile(r"(.*?)(\d{1,9})$")


class Host(Value):
    """One line of a hostfile."""

    name: str
    slots: int | None = None
    """Devices on it; None where the file does not say."""


def check_name(name: str, where: str = "host") -> str:
    """`name` itself, an IPv6 address in its usual spelling and without brackets.

    Raises UserError when it is no host name, address or alias of ssh. An address has no zone
    (`%eth0`): it would mean another host on each machine.
    """
    if _NAME.fullmatch(name):
        return name
    if (match := _IPV6.fullmatch(name)) and name.startswith("[") == name.endswith("]"):
        with suppress(ValueError):
            return IPv6Address(match[1]).compressed
    raise UserError(
        where,
        f"{name!r} is no host name",
        allowed="letters, digits, . _ - or an IPv6 address (fd00::5, [fd00::5]:8 with 8 slots)",
    )


def first_repeated(names: Iterable[str]) -> str | None:
    """The first name of a host that was named before; case makes no difference between hosts."""
    seen: set[str] = set()
    for name in names:
        if name.casefold() in seen:
            return name
        seen.add(name.casefold())
    return None


def expand(text: str, where: str = "hosts") -> list[str]:
    """The names that a list such as `node[001-003,7],gpu-a` stands for, in its order.

    Raises UserError for a name that is none and a range that cannot be read.
    """
    names: list[str] = []
    for part in filter(None, map(str.strip, _COMMA.split(text))):
        names += _expanded(part, where)
        if len(names) > MAX_HOSTS:
            raise UserError(where, "names too many", allowed=f"{MAX_HOSTS} hosts")
    return [check_name(name, where) for name in names]


def compress(names: Sequence[str]) -> str:
    """A short text for many names: consecutive numbers of one width become a range."""
    parts: list[list[tuple[str, str]]] = []
    """Names as (prefix, digits), those together that one range can hold."""
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
    """The hosts of a file in DeepSpeed's (`node-1 slots=8`), MPI's (`node-1:8`) or plain form.

    `#` begins a comment; a name may be a range. Raises UserError with the line number for a blank
    line between hosts, a host named twice, a name that is none, and other words.
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
    """A hostfile in DeepSpeed's form, in the plain one where slots are unknown."""
    return "".join(
        f"{host.name} slots={host.slots}\n" if host.slots else f"{host.name}\n" for host in hosts
    )


def _hosts_of(words: str, where: str) -> list[Host]:
    name, *rest = words.split()
    slots: list[int] = []
    for word in rest:
        match = _SLOTS.fullmatch(word)
        if match is None or match[1] is None:
            raise UserError(where, f"{word!r} is unknown", allowed="HOST, HOST slots=N or HOST:N")
        slots += [] if word.startswith("max_") else [int(match[1])]
    # After brackets, or the only one: in an address without brackets the last part is no number.
    ends_address = name.startswith("[") or name.count(":") == 1
    if ends_address and (match := _SLOTS.search(name)):
        name, slots = name[: match.start()], [int(match[2]), *slots]
    if 0 in slots or len(slots) > 1:
        what = "has no slots" if 0 in slots else "names its slots twice"
        raise UserError(where, what, allowed="1 and more, once")
    return [Host(name=host, slots=slots[0] if slots else None) for host in expand(name, where)]


def _expanded(text: str, where: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    if match is None:
        return [text]
    head, numbers, rest = match.groups()
    if rest.count("[") >= MOST_RANGES:
        raise UserError(where, "has too many ranges in one name", allowed=f"{MOST_RANGES}")
    pieces = [_ends(piece, numbers, where) for piece in numbers.split(",")]
    tails = _expanded(rest, where)
    if sum(last - first + 1 for first, last, _ in pieces) * len(tails) > MAX_HOSTS:
        raise UserError(where, f"[{_short(numbers)}] is too many", allowed=f"{MAX_HOSTS} hosts")
    middle = [str(n).zfill(width) for first, last, width in pieces for n in range(first, last + 1)]
    return [head + number + tail for number in middle for tail in tails]


def _ends(piece: str, numbers: str, where: str) -> tuple[int, int, int]:
    """The first and the last number of a piece such as `001-064`, and how many digits it writes."""
    ends = _NUMBERS.fullmatch(piece)
    first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
    if ends is None or last < first:
        raise UserError(where, f"[{_short(numbers)}] is no range", allowed="node[001-064,70]")
    return first, last, len(ends[1])


def _short(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _range_text(part: Sequence[tuple[str, str]]) -> str:
    (prefix, low), (_, high) = part[0], part[-1]
    return f"{prefix}[{low}-{high}]" if len(part) > 1 else prefix + low
