"""Logs of NCCL_DEBUG=INFO with the subsystems INIT, COLL, P2P, NET, and TUNING if it is there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.core.traffic import Collective
from paceline.files.log_file import LogFile
from paceline.profiles.nccl import lines
from paceline.profiles.nccl.communication import AlgorithmRow, Communication
from paceline.profiles.nccl.doubts import Hop, LogFacts, network_doubts
from paceline.profiles.nccl.tally import Membership, Tally, world_ranks

T = TypeVar("T")
MOST = 64
"""Names of a kind that are kept, of versions, interfaces and the like."""
MOST_MEMBERS = 100_000
"""Communicators times processes, and connections; more are no training's."""


@dataclass
class _Choice:
    calls: int = 0
    num_bytes: int = 0
    channels: tuple[int, int] | None = None

    def add(self, num_bytes: int, first: bytes, last: bytes) -> None:
        self.calls += 1
        self.num_bytes += num_bytes
        if first:
            low, high = self.channels or (int(first), int(last))
            self.channels = min(low, int(first)), max(high, int(last))


class DebugLog:
    """Reads one log after the other; `communication` then says what they hold."""

    def __init__(self) -> None:
        self.facts = LogFacts()
        self.tally = Tally()
        self.torn_lines = 0
        self.broken_off: str | None = None
        self.num_lines = 0
        """NCCL's, of any kind."""
        self._members: dict[tuple[bytes, bytes, int], Membership] = {}
        self._of_pointer: dict[tuple[bytes, int], Membership] = {}
        """For lines that have lost their begin."""
        self._choices: defaultdict[tuple[str, str, str], _Choice] = defaultdict(_Choice)
        self._channels: set[int] = set()

    def read(self, path: Path) -> None:
        """All of a file, in blocks; raises OSError where it cannot be read."""
        log = LogFile(path)
        for block in log:
            self._block(block)
        self.broken_off = self.broken_off or log.broken_off

    def communication(
        self, axes: Mapping[tuple[int, ...], str] | None = None, steps: int | None = None
    ) -> Communication:
        """The tables; `axes` names the groups of world ranks, `steps` is what was logged."""
        facts = self.facts
        return Communication(
            source="nccl log",
            ranks=len(self.tally.processes),
            steps=steps,
            rows=self.tally.rows(world_ranks(self._members.values()), axes),
            algorithms=tuple(
                AlgorithmRow(
                    collective=collective,
                    algorithm=algorithm,
                    protocol=protocol,
                    calls=choice.calls,
                    num_bytes=choice.num_bytes,
                    first_channel=choice.channels and choice.channels[0],
                    last_channel=choice.channels and choice.channels[1],
                )
                for (collective, algorithm, protocol), choice in sorted(self._choices.items())
            ),
            network=NcclNetwork(
                library=tuple(sorted(facts.versions)),
                used=tuple(sorted(facts.networks)),
                devices=tuple(sorted(facts.devices)),
                sockets=tuple(sorted(facts.sockets)),
                transports=dict(facts.transports.most_common()),
                channels=tuple(sorted(self._channels)),
                settings=dict(sorted(facts.settings.items())),
            ),
            torn_lines=self.torn_lines,
            broken_off=self.broken_off,
            warnings=tuple(network_doubts(facts)),
        )

    def _block(self, block: bytes) -> None:
        mentioned = block.count(b"NCCL ")
        self.num_lines += mentioned
        calls = lines.CALL.findall(block)
        self.torn_lines += max(0, block.count(lines.CALL_MARK) - len(calls))
        if mentioned > len(calls):
            self._set_up(block)
            self._chosen(block)
        for call, times in Counter(calls).items():
            self._call(call, times)

    def _call(self, call: tuple[bytes, ...], times: int) -> None:
        process, word, count, datatype, pointer, size = call
        width = lines.datatype_bytes(int(datatype))
        member = self._member(process, pointer, int(size))
        if width is None or member is None:
            self.torn_lines += times
            return
        collective: Collective = lines.COLLECTIVES[word]
        parts = int(size) if collective in lines.OF_ONE_RANK else 1
        self.tally.add(member, collective, int(count) * width * parts, times)

    def _member(self, process: bytes, pointer: bytes, size: int) -> Membership | None:
        """Whose call it is; a communicator whose beginning was not logged has a name of its own."""
        if not process:
            return self._of_pointer.get((pointer, size))
        key = process, pointer, size
        member = self._members.get(key)
        if member is None and len(self._members) < MOST_MEMBERS and size > 0:
            name = f"{process.decode()} {pointer.decode()}"
            member = self._members[key] = Membership(process.decode(), name, size)
            self._of_pointer[pointer, size] = member
        return member

    def _set_up(self, block: bytes) -> None:
        facts = self.facts
        for process, pointer, rank, size, shared in lines.COMMUNICATOR.findall(block):
            name = (shared or process + b" " + pointer).decode()
            if len(self._members) < MOST_MEMBERS and int(size) > 0:
                member = Membership(process.decode(), name, int(size), int(rank))
                self._members[process, pointer, int(size)] = member
                self._of_pointer[pointer, int(size)] = member
        for process, begin, end, via in lines.CHANNEL.findall(block):
            kind = lines.transport(via)
            if kind in facts.transports or len(facts.transports) < MOST:
                facts.transports[kind] += 1
            if len(facts.hops) < MOST_MEMBERS:
                host = process.rpartition(b":")[0].decode()
                facts.hops.add(Hop(host, int(begin), int(end), kind))
        _keep(self._channels, map(int, lines.CHANNELS.findall(block)))
        _keep(facts.versions, map(_text, lines.VERSION.findall(block)))
        _keep(facts.networks, map(_text, lines.NETWORK.findall(block)))
        for _, names in lines.DEVICES.findall(block):
            _keep(facts.devices, map(_text, lines.DEVICE.findall(names)))
        addresses = map(lines.INTERFACE.match, lines.SOCKET.findall(block))
        _keep(facts.sockets, (_text(match[1]) for match in addresses if match))
        for name, value in lines.SETTING.findall(block):
            if len(facts.settings) < MOST:
                facts.settings[_text(name)] = _text(value).rstrip(".")
        facts.no_infiniband |= lines.NO_DEVICE.search(block) is not None
        for text in lines.COMPLAINT.findall(block):
            if len(facts.complaints) < MOST:
                facts.complaints.setdefault(_text(text))

    def _chosen(self, block: bytes) -> None:
        for word, size, algorithm, protocol, first, last in lines.CHOICE.findall(block):
            collective: str = lines.COLLECTIVES.get(word) or "unknown"
            key = (
                collective,
                lines.named(algorithm, lines.ALGORITHMS),
                lines.named(protocol, lines.PROTOCOLS),
            )
            if key in self._choices or len(self._choices) < MOST:
                self._choices[key].add(int(size), first, last)


def _text(word: bytes) -> str:
    return word.decode("utf-8", "replace").strip()


def _keep(names: set[T], more: Iterable[T]) -> None:
    """Add what there is room for."""
    for name in more:
        if len(names) < MOST:
            names.add(name)
