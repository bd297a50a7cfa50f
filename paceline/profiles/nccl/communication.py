"""What ranks exchanged: one table, whoever counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from pydantic import NonNegativeFloat

from paceline.core.traffic import LINK_SHARE, Collective
from paceline.core.value import NonNegativeInt, PositiveInt, Value


class SizeBin(Value):
    """Messages of more than half of `up_to_bytes` and at most as many."""

    up_to_bytes: NonNegativeInt
    """A power of two; 0 for empty messages."""
    calls: NonNegativeFloat
    """Of a rank."""


class ExchangeRow(Value):
    """One collective over communicators of one kind; figures are the mean of a rank."""

    axis: str | None = None
    """Of the layout, `cp+dp` where two have the same ranks; None where nothing tells it."""
    size: PositiveInt
    """Ranks of a communicator."""
    stride: PositiveInt | None = None
    """Between its world ranks; None where they are not known, or not evenly spaced."""
    communicators: PositiveInt
    """Of this kind in the log."""
    members: PositiveInt
    """Ranks that were counted."""
    collective: Collective
    calls: NonNegativeFloat
    num_bytes: NonNegativeFloat
    """Of whole tensors: gathered by an all-gather, before a reduce-scatter."""
    seconds: NonNegativeFloat | None = None
    """In the collective, waits for other ranks included; None where only calls are logged."""
    sizes: tuple[SizeBin, ...] = ()

    @property
    def link_bytes(self) -> float:
        """Bytes through one rank's links, as nccl-tests counts bus bandwidth."""
        return LINK_SHARE[self.collective](self.size) * self.num_bytes

    @property
    def bus_bytes_per_s(self) -> float | None:
        """Bus bandwidth in the time of the calls."""
        return self.link_bytes / self.seconds if self.seconds else None


class AlgorithmRow(Value):
    """What NCCL chose for how much; rank 0 of each communicator says it."""

    collective: str
    algorithm: str
    protocol: str
    calls: NonNegativeInt
    num_bytes: NonNegativeInt
    first_channel: NonNegativeInt | None = None
    last_channel: NonNegativeInt | None = None


class NcclNetwork(Value):
    """What the processes of a log say they connect by."""

    library: tuple[str, ...] = ()
    """Versions of NCCL or RCCL."""
    used: tuple[str, ...] = ()
    """Networks by NCCL's name: IB, Socket, AWS Libfabric."""
    devices: tuple[str, ...] = ()
    """Network devices, `mlx5_0:1/IB`."""
    sockets: tuple[str, ...] = ()
    """Interfaces that sockets use, those of the bootstrap included."""
    transports: dict[str, NonNegativeInt] = {}
    """Connections of channels by kind, `P2P/IPC`, `NET/IB GDRDMA`."""
    channels: tuple[NonNegativeInt, ...] = ()
    """Channels of a communicator, each number that occurs."""
    settings: dict[str, str] = {}
    """NCCL's variables that were set."""


class Communication(Value):
    """What ranks exchanged in some steps, or in all of a log."""

    source: Literal["nccl log", "nccl inspector", "trainer counters"]
    ranks: NonNegativeInt
    """Processes that were counted."""
    steps: PositiveInt | None = None
    """That the figures are the sum of; None where nobody says."""
    rows: tuple[ExchangeRow, ...] = ()
    algorithms: tuple[AlgorithmRow, ...] = ()
    network: NcclNetwork = NcclNetwork()
    torn_lines: NonNegativeInt = 0
    """Calls whose line is not whole, which are missing from the figures."""
    broken_off: str | None = None
    """Why a file could not be read to its end."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Membership:
    """A process in a communicator."""

    process: str
    communicator: str
    """What all its ranks call it, else what the process does."""
    size: int
    rank: int | None = None
    """In the communicator."""
    axis: str | None = None
    """Of the layout, where the process says it."""


@dataclass(frozen=True)
class _Kind:
    """Communicators that are told in one row."""

    axis: str | None
    size: int
    stride: int | None


@dataclass
class _Sum:
    calls: int = 0
    num_bytes: int = 0
    seconds: float | None = None
    sizes: Counter[int] = field(default_factory=Counter[int])


class Tally:
    """Calls and bytes by member of a communicator, collective and size."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[Membership, Collective], _Sum] = defaultdict(_Sum)

    def add(
        self,
        member: Membership,
        collective: Collective,
        num_bytes: int,
        calls: int = 1,
        seconds: float | None = None,
    ) -> None:
        """So many calls of one size; `seconds` of all of them together."""
        total = self._sums[member, collective]
        total.calls += calls
        total.num_bytes += calls * num_bytes
        total.sizes[bin_of(num_bytes)] += calls
        if seconds is not None:
            total.seconds = (total.seconds or 0.0) + seconds

    @property
    def processes(self) -> set[str]:
        """All that called anything."""
        return {member.process for member, _ in self._sums}

    def rows(
        self,
        ranks_of: Mapping[str, Sequence[int]] | None = None,
        axes: Mapping[tuple[int, ...], str] | None = None,
    ) -> tuple[ExchangeRow, ...]:
        """One row a kind of communicator and collective, the most bytes first.

        `ranks_of` are a communicator's world ranks as far as they are known, `axes` what the
        layout's groups are called. A communicator of which ranks are unknown has no axis.
        """
        merged: defaultdict[tuple[_Kind, Collective], list[tuple[Membership, _Sum]]] = defaultdict(
            list
        )
        for (member, collective), total in self._sums.items():
            ranks = tuple(sorted((ranks_of or {}).get(member.communicator, ())))
            complete = len(ranks) == member.size
            axis = member.axis or ((axes or {}).get(ranks) if complete else None)
            merged[_Kind(axis, member.size, stride(ranks, member.size)), collective].append(
                (member, total)
            )
        rows = [_row(kind, collective, sums) for (kind, collective), sums in merged.items()]
        return tuple(sorted(rows, key=lambda row: -row.num_bytes))


def world_ranks(members: Iterable[Membership]) -> dict[str, list[int]]:
    """World ranks of each communicator: a process's rank in its largest one is the world's."""
    ranked = [(member, member.rank) for member in members if member.rank is not None]
    world: dict[str, tuple[int, int]] = {}
    for member, rank in ranked:
        world[member.process] = max(world.get(member.process, (0, 0)), (member.size, rank))
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for member, _ in ranked:
        ranks[member.communicator].append(world[member.process][1])
    return ranks


def bin_of(num_bytes: int) -> int:
    """The smallest power of two that is at least as large; 0 for nothing."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


def stride(ranks: Sequence[int], size: int) -> int | None:
    """The distance of neighbours, None unless all ranks are known and evenly spaced."""
    if len(ranks) != size or size < 2:
        return None
    steps = {after - before for before, after in pairwise(ranks)}
    return steps.pop() if len(steps) == 1 else None


def _row(
    kind: _Kind, collective: Collective, sums: Iterable[tuple[Membership, _Sum]]
) -> ExchangeRow:
    members = list(sums)
    n = len({member.process for member, _ in members})
    sizes: Counter[int] = Counter()
    for _, total in members:
        sizes.update(total.sizes)
    seconds = [total.seconds for _, total in members if total.seconds is not None]
    return ExchangeRow(
        axis=kind.axis,
        size=kind.size,
        stride=kind.stride,
        communicators=len({member.communicator for member, _ in members}),
        members=n,
        collective=collective,
        calls=sum(total.calls for _, total in members) / n,
        num_bytes=sum(total.num_bytes for _, total in members) / n,
        seconds=sum(seconds) / n if seconds else None,
        sizes=tuple(SizeBin(up_to_bytes=b, calls=calls / n) for b, calls in sorted(sizes.items())),
    )
