"""Table of the traffic between ranks, independent of its source."""

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
    """Messages with more than half of `up_to_bytes` and up to `up_to_bytes`."""

    up_to_bytes: NonNegativeInt
    """A power of two; 0 for empty messages."""
    calls: NonNegativeFloat
    """Calls per rank."""


class ExchangeRow(Value):
    """One collective over communicators of one kind; figures are means per rank."""

    axis: str | None = None
    """Axis of the layout, `cp+dp` if two axes have the same ranks; None if unknown."""
    size: PositiveInt
    """Number of ranks of a communicator."""
    stride: PositiveInt | None = None
    """Distance between its world ranks; None if unknown or not evenly spaced."""
    communicators: PositiveInt
    """Number of communicators of this kind."""
    members: PositiveInt
    """Number of ranks with data."""
    collective: Collective
    calls: NonNegativeFloat
    num_bytes: NonNegativeFloat
    """Bytes of the complete tensors: after an all-gather, before a reduce-scatter."""
    seconds: NonNegativeFloat | None = None
    """Seconds in the collective, including waits for other ranks; None if only calls are logged."""
    sizes: tuple[SizeBin, ...] = ()

    @property
    def link_bytes(self) -> float:
        """Bytes through one rank's links, by nccl-tests' definition of bus bandwidth."""
        return LINK_SHARE[self.collective](self.size) * self.num_bytes

    @property
    def bus_bytes_per_s(self) -> float | None:
        """Bus bandwidth in the time of the calls."""
        return self.link_bytes / self.seconds if self.seconds else None


class AlgorithmRow(Value):
    """Algorithm and protocol chosen by NCCL, as logged by rank 0 of each communicator."""

    collective: str
    algorithm: str
    protocol: str
    calls: NonNegativeInt
    num_bytes: NonNegativeInt
    first_channel: NonNegativeInt | None = None
    last_channel: NonNegativeInt | None = None


class NcclNetwork(Value):
    """Network and settings of the processes in a log."""

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
    """Numbers of channels per communicator that occur."""
    settings: dict[str, str] = {}
    """NCCL variables in the environment."""


class Communication(Value):
    """Traffic between ranks in some steps, or in a complete log."""

    source: Literal["nccl log", "nccl inspector", "trainer counters"]
    ranks: NonNegativeInt
    """Number of processes with data."""
    steps: PositiveInt | None = None
    """Number of steps that the figures are the sum of; None if unknown."""
    rows: tuple[ExchangeRow, ...] = ()
    algorithms: tuple[AlgorithmRow, ...] = ()
    network: NcclNetwork = NcclNetwork()
    torn_lines: NonNegativeInt = 0
    """Calls on incomplete lines, which are missing from the figures."""
    broken_off: str | None = None
    """Reason why a file could not be read to its end."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Membership:
    """A process in a communicator."""

    process: str
    communicator: str
    """Id shared by all its ranks, or the process's own name for it."""
    size: int
    rank: int | None = None
    """Rank within the communicator."""
    axis: str | None = None
    """Axis of the layout, if the process reports it."""


@dataclass(frozen=True)
class _Kind:
    """Key of the communicators that share a row."""

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
    """Counters of calls and bytes by member of a communicator, collective and size."""

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
        """Add calls of one size; `seconds` is their total."""
        total = self._sums[member, collective]
        total.calls += calls
        total.num_bytes += calls * num_bytes
        total.sizes[bin_of(num_bytes)] += calls
        if seconds is not None:
            total.seconds = (total.seconds or 0.0) + seconds

    @property
    def processes(self) -> set[str]:
        """Processes with at least one call."""
        return {member.process for member, _ in self._sums}

    def rows(
        self,
        ranks_of: Mapping[str, Sequence[int]] | None = None,
        axes: Mapping[tuple[int, ...], str] | None = None,
    ) -> tuple[ExchangeRow, ...]:
        """Return one row per kind of communicator and collective, ordered by bytes.

        `ranks_of` has the known world ranks of a communicator, `axes` the names of the layout's
        groups. A communicator with unknown ranks has no axis.
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
    """Return the world ranks of each communicator.

    A process's world rank is its rank in its largest communicator."""
    members_with_rank = [(member, member.rank) for member in members if member.rank is not None]
    world: dict[str, tuple[int, int]] = {}
    for member, rank in members_with_rank:
        world[member.process] = max(world.get(member.process, (0, 0)), (member.size, rank))
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for member, _ in members_with_rank:
        ranks[member.communicator].append(world[member.process][1])
    return ranks


def bin_of(num_bytes: int) -> int:
    """Return the smallest power of two that is at least as large; 0 for 0."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


def stride(ranks: Sequence[int], size: int) -> int | None:
    """Return the distance between neighbours; None unless all ranks are known and evenly spaced."""
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
