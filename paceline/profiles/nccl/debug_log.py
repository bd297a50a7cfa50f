"""Reader of NCCL_DEBUG=INFO logs with the subsystems INIT, COLL, P2P, NET and optionally TUNING.

Lines are those of NCCL 2.4 to 2.28 and RCCL, found anywhere in a block of text: several processes
write into one file, so a line can follow the start of another and lack its own. `opCount` is
hexadecimal. `count` is the argument of the call: what one rank puts into an all-gather, what one
gets from a reduce-scatter.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from paceline.core.text import whole_number
from paceline.core.traffic import Collective
from paceline.core.units import pluralize
from paceline.files.log_file import LogFile
from paceline.profiles.nccl.communication import (
    AlgorithmRow,
    Communication,
    Membership,
    NcclNetwork,
    Tally,
    world_ranks,
)

COLLECTIVES: dict[bytes, Collective] = {
    b"AllReduce": "all_reduce",
    b"AllGather": "all_gather",
    b"ReduceScatter": "reduce_scatter",
    b"Broadcast": "broadcast",
    b"Reduce": "reduce",
    b"AllToAll": "all_to_all",
    b"AlltoAll": "all_to_all",
    b"Send": "send",
    b"Recv": "recv",
}
PER_RANK_COUNTS: frozenset[Collective] = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
"""Collectives whose count is one rank's part."""
DATATYPE_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
"""Bytes by NCCL's number: int8 uint8 int32 uint32 int64 uint64 fp16 fp32 fp64 bf16, two of fp8."""
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
CALL_MARK = b": opCount "

_WHO = rb"(?:([\w.-]{1,253}:\d{1,10}):\d{1,10} \[\d+\] (?:\d+ )?NCCL INFO )?"
CALL = re.compile(
    _WHO + rb"(" + b"|".join(COLLECTIVES) + rb"): opCount [0-9a-fx]{1,18} sendbuff \S{1,20} "
    rb"recvbuff \S{1,20} (?:acc \S{1,20} )?count (\d{1,18}) datatype (\d{1,2}) op \d+ root -?\d+ "
    rb"comm (0x[0-9a-f]{1,16}) \[nranks=(\d{1,7})\]"
)
"""(process, collective, count, datatype, communicator's pointer, ranks)."""
COMMUNICATOR = re.compile(
    rb"([\w.-]{1,253}:\d{1,10}):\d{1,10} \[\d+\] NCCL INFO (?:\w{4,30} )?comm (0x[0-9a-f]{1,16}) "
    rb"rank (\d{1,7}) n[Rr]anks (\d{1,7}) [^\r\n]{0,200}?"
    rb"(?:commId (0x[0-9a-f]{1,16}) )?- Init COMPLETE"
)
"""(process, pointer, rank, ranks, id that all its ranks share, in newer versions)."""
CHOICE = re.compile(
    rb"NCCL INFO (?:(\w{3,20}): )?(\d{1,18}) Bytes -> Algo (\w{1,16}) proto (\w{1,8})"
    rb"(?: channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(\d{1,4})\})?"
)
"""(collective, bytes, algorithm, protocol, first channel, last channel)."""
CHANNEL = re.compile(
    rb"[\w.-]{1,253}:\d{1,10}:\d{1,10} \[\d+\] NCCL INFO Channel \d+(?:/\d+)? : "
    rb"\d{1,7}\[\w+\] -> \d{1,7}\[\w+\] (?:\[(?:send|receive)\] )?via ([^\r\n]{3,60})"
)
"""Transport of a connection."""
CHANNELS = re.compile(rb"NCCL INFO (\d{1,4}) coll channels, ")
VERSION = re.compile(rb"(?:NCCL|RCCL) version (?:: )?(\d+\.\d+\.\d+[\w.+-]{0,40})")
NETWORK = re.compile(rb"NCCL INFO Using network ([^\r\n]{1,40})")
DEVICES = re.compile(rb"NCCL INFO NET/(g?IB\w*) ?: Using ((?: ?\[\d+\][\w.-]+:\d+/\w+(?:/\w+)?)+)")
DEVICE = re.compile(rb"\[\d+\]([\w.-]+:\d+/\w+)")
NO_DEVICE = re.compile(rb"NCCL INFO NET/IB ?: No device found")
SOCKET = re.compile(rb"NCCL INFO (NET/Socket|Bootstrap) ?: Using ([^\r\n]{3,1000})")
INTERFACE = re.compile(
    rb"(?:\[\d{1,4}\])?([\w.-]{1,15}):([0-9a-fA-F.:\[\]]{2,60})(?:%[\w.-]{1,15})?<\d{1,5}>"
)
"""(interface, address)."""
PROVIDER = re.compile(
    rb"NCCL INFO NET/OFI Selected (?i:provider) is ([\w;-]{1,40})"
    rb"(?:, fabric is [\w;./:-]{1,60})?(?: \(found (\d{1,4}) nics\))?"
)
"""(libfabric provider, its number of network devices)."""
GRAPH = re.compile(
    rb"NCCL INFO Pattern \w{1,12}, crossNic \d{1,3}, nChannels \d{1,4}, bw [\d./]{1,40}, "
    rb"type (\w{2,4})/\w{2,4}, "
)
"""Type of the path between the GPUs of a node."""
NVLS = re.compile(rb"NCCL INFO Connected NVLS tree|, [1-9]\d{0,3} nvls channels, ")
DEVICE_NUMBER = re.compile(rb"NET/([^/\r\n]{1,30})/(\d{1,4})\b")
"""(network, number of the device) of a connection."""
SETTING = re.compile(rb"NCCL INFO (N?R?CCL_\w{2,40}) set by environment to ([^\r\n]{1,80})")
PROCESS = re.compile(rb"([\w.-]{1,253}):(\d{1,10}):\d{1,10} \[\d+\] (?:\d+ )?NCCL INFO ")
"""(host, process)."""
COMPLAINT = re.compile(rb"NCCL WARN ([^\r\n]{1,300})")


def datatype_bytes(number: int) -> int | None:
    """Return the bytes of one element, or None for an unknown type."""
    return DATATYPE_BYTES[number] if number < len(DATATYPE_BYTES) else None


def transport(text: bytes) -> str:
    """Return the kind of a transport.

    `P2P/CUMEM/read` -> `P2P/CUMEM`, `NET/IB/3/GDRDMA` -> `NET/IB GDRDMA`."""
    words = text.decode("ascii", "replace").split(" comm ")[0].strip().split("/")
    kind = "/".join(words[:2])
    direct = words[0] == "NET" and any(word.startswith("GDRDMA") for word in words[2:])
    return f"{kind} GDRDMA" if direct else kind


def canonical_name(word: bytes, names: tuple[str, ...]) -> str:
    """Return the name of an algorithm or protocol, which older versions print as a number."""
    text = word.decode("ascii", "replace")
    if (number := whole_number(text)) is not None:
        return names[number] if number < len(names) else text
    return next((name for name in names if name.upper() == text.upper()), text)


T = TypeVar("T")
MAX_NAMES = 64
"""Maximum number of names of a kind, such as versions or interfaces."""
MAX_COMPLAINTS = 3
"""Maximum number of NCCL's warnings that are repeated."""
MAX_MEMBERS = 100_000
"""Maximum number of communicators times processes, and of connections."""


@dataclass
class LogFacts:
    """Connections and settings that processes report."""

    versions: set[str] = field(default_factory=set[str])
    networks: set[str] = field(default_factory=set[str])
    devices: set[str] = field(default_factory=set[str])
    sockets: set[str] = field(default_factory=set[str])
    socket_addresses: dict[str, str] = field(default_factory=dict[str, str])
    """Addresses of the interfaces that sockets between nodes use."""
    providers: set[str] = field(default_factory=set[str])
    """Providers of libfabric."""
    num_provider_devices: int = 0
    used_devices: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """Network and number of the devices in connections."""
    paths: set[str] = field(default_factory=set[str])
    """Types of paths between the GPUs of a node: NVL, PIX, SYS."""
    has_nvls: bool = False
    """True if NVLink SHARP is in use."""
    settings: dict[str, str] = field(default_factory=dict[str, str])
    transports: Counter[str] = field(default_factory=Counter[str])
    processes: set[tuple[bytes, bytes]] = field(default_factory=set[tuple[bytes, bytes]])
    """Host and number of each process."""
    num_ranks: int = 0
    """Ranks of the largest communicator."""
    no_infiniband: bool = False
    complaints: dict[str, None] = field(default_factory=dict[str, None])

    @property
    def spans_hosts(self) -> bool:
        """True unless all processes of the job are in the log and on one host."""
        hosts = {host for host, _ in self.processes}
        return len(hosts) > 1 or self.num_ranks > len(self.processes)


def network_warnings(facts: LogFacts) -> Iterator[str]:
    """Yield a sentence for each kind of connection that is slower than a machine's best one."""

    def num(begin: str, end: str = "") -> int:
        return sum(
            n
            for name, n in facts.transports.items()
            if name.startswith(begin) and name.endswith(end)
        )

    if num("NET/Socket") or (
        "Socket" in facts.networks and not facts.transports and facts.spans_hosts
    ):
        over = f" ({', '.join(sorted(facts.sockets))})" if facts.sockets else ""
        why = "; NCCL found no InfiniBand device" if facts.no_infiniband else ""
        yield f"Hosts communicate over TCP sockets{over}, not over InfiniBand or RoCE{why}."
    if (without := num("NET/IB") - num("NET/IB", "GDRDMA")) > 0:
        yield f"{without} of {num('NET/IB')} InfiniBand connections do not use GPU Direct RDMA."
    if shared := num("SHM"):
        yield f"{pluralize(shared, 'connection', 'go')} through CPU memory (SHM), not peer to peer."
    if len(facts.versions) > 1:
        yield f"Processes run different libraries: {', '.join(sorted(facts.versions))}."
    for text in list(facts.complaints)[:MAX_COMPLAINTS]:
        yield f"NCCL warns: {text}"
    if len(facts.complaints) > MAX_COMPLAINTS:
        yield f"NCCL warns of {pluralize(len(facts.complaints) - MAX_COMPLAINTS, 'further kind')}."


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
    """Reader of one or more logs; `communication` returns their content."""

    def __init__(self) -> None:
        self.facts = LogFacts()
        self.tally = Tally()
        self.torn_lines = 0
        self.broken_off: str | None = None
        self.num_lines = 0
        """Number of NCCL lines of any kind."""
        self._members: dict[tuple[bytes, bytes, int], Membership] = {}
        self._of_pointer: dict[tuple[bytes, int], Membership] = {}
        """Members by pointer, for lines without their start."""
        self._choices: defaultdict[tuple[str, str, str], _Choice] = defaultdict(_Choice)
        self._channels: set[int] = set()

    def read(self, path: Path) -> None:
        """Read a file in blocks; raises OSError if it cannot be read."""
        log = LogFile(path)
        for block in log:
            self._block(block)
        self.broken_off = self.broken_off or log.read_error

    def communication(
        self, axes: Mapping[tuple[int, ...], str] | None = None, steps: int | None = None
    ) -> Communication:
        """Return the traffic; `axes` names groups of world ranks, `steps` counts logged steps."""
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
            warnings=tuple(network_warnings(facts)),
        )

    def _block(self, block: bytes) -> None:
        num_lines = block.count(b"NCCL ")
        self.num_lines += num_lines
        calls = CALL.findall(block)
        self.torn_lines += max(0, block.count(CALL_MARK) - len(calls))
        if num_lines > len(calls):
            self._read_setup(block)
            self._read_choices(block)
        for call, times in Counter(calls).items():
            self._call(call, times)

    def _call(self, call: tuple[bytes, ...], times: int) -> None:
        process, word, count, datatype, pointer, size = call
        width = datatype_bytes(int(datatype))
        member = self._member(process, pointer, int(size))
        if width is None or member is None:
            self.torn_lines += times
            return
        collective: Collective = COLLECTIVES[word]
        parts = int(size) if collective in PER_RANK_COUNTS else 1
        self.tally.add(member, collective, int(count) * width * parts, times)

    def _member(self, process: bytes, pointer: bytes, size: int) -> Membership | None:
        """Return the caller; a communicator whose setup was not logged gets its own name."""
        if not process:
            return self._of_pointer.get((pointer, size))
        key = process, pointer, size
        member = self._members.get(key)
        if member is None and len(self._members) < MAX_MEMBERS and size > 0:
            name = f"{process.decode()} {pointer.decode()}"
            member = self._members[key] = Membership(process.decode(), name, size)
            self._of_pointer[pointer, size] = member
        return member

    def _read_setup(self, block: bytes) -> None:
        facts = self.facts
        _add_limited(facts.processes, PROCESS.findall(block), MAX_MEMBERS)
        for process, pointer, rank, size, shared in COMMUNICATOR.findall(block):
            facts.num_ranks = max(facts.num_ranks, int(size))
            name = (shared or process + b" " + pointer).decode()
            if len(self._members) < MAX_MEMBERS and int(size) > 0:
                member = Membership(process.decode(), name, int(size), int(rank))
                self._members[process, pointer, int(size)] = member
                self._of_pointer[pointer, int(size)] = member
        for via in CHANNEL.findall(block):
            kind = transport(via)
            if kind in facts.transports or len(facts.transports) < MAX_NAMES:
                facts.transports[kind] += 1
            if device := DEVICE_NUMBER.match(via):
                _add_limited(facts.used_devices, [(_text(device[1]), int(device[2]))])
        _add_limited(self._channels, map(int, CHANNELS.findall(block)))
        _add_limited(facts.versions, map(_text, VERSION.findall(block)))
        _add_limited(facts.networks, map(_text, NETWORK.findall(block)))
        for _, names in DEVICES.findall(block):
            _add_limited(facts.devices, map(_text, DEVICE.findall(names)))
        for user, names in SOCKET.findall(block):
            for name, address in INTERFACE.findall(names):
                _add_limited(facts.sockets, [_text(name)])
                if user != b"Bootstrap" and len(facts.socket_addresses) < MAX_NAMES:
                    facts.socket_addresses[_text(name)] = _text(address)
        for provider, count in PROVIDER.findall(block):
            _add_limited(facts.providers, [_text(provider)])
            facts.num_provider_devices = max(facts.num_provider_devices, int(count or 0))
        _add_limited(facts.paths, map(_text, GRAPH.findall(block)))
        facts.paths.discard("LOC")
        facts.has_nvls |= NVLS.search(block) is not None
        for name, value in SETTING.findall(block):
            if len(facts.settings) < MAX_NAMES:
                facts.settings[_text(name)] = _text(value).rstrip(".")
        facts.no_infiniband |= NO_DEVICE.search(block) is not None
        for text in COMPLAINT.findall(block):
            if len(facts.complaints) < MAX_NAMES:
                facts.complaints.setdefault(_text(text))

    def _read_choices(self, block: bytes) -> None:
        for word, size, algorithm, protocol, first, last in CHOICE.findall(block):
            collective: str = COLLECTIVES.get(word) or "unknown"
            key = (
                collective,
                canonical_name(algorithm, ALGORITHMS),
                canonical_name(protocol, PROTOCOLS),
            )
            if key in self._choices or len(self._choices) < MAX_NAMES:
                self._choices[key].add(int(size), first, last)


def _text(word: bytes) -> str:
    return word.decode("utf-8", "replace").strip()


def _add_limited(names: set[T], more: Iterable[T], limit: int = MAX_NAMES) -> None:
    """Add names up to `limit`."""
    for name in more:
        if len(names) < limit:
            names.add(name)
