"""What ranks exchanged: one table, whoever counted."""

from __future__ import annotations

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
