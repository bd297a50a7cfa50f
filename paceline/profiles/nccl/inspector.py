"""Reader of NCCL inspector records: one JSON object per collective, one file per process.

Formats 4 and 5: {"header": {id, rank, n_ranks, nnodes}, "metadata": {hostname, pid, ...},
"coll_perf": {coll, coll_msg_size_bytes, coll_exec_time_us, ...}}; RCCL's has the same fields. The
size is one rank's part of an all-gather and of a reduce-scatter, as in the log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError

from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.log_file import LogFile
from paceline.profiles.nccl.communication import (
    AlgorithmRow,
    Communication,
    Membership,
    Tally,
    world_ranks,
)
from paceline.profiles.nccl.debug_log import COLLECTIVES, PER_RANK_COUNTS

MARK = b'"coll_perf"'
MAX_MEMBERS = 100_000
Microseconds = Annotated[float, Field(ge=0, le=1e12)]


class InspectorPart(Value):
    """Part of a record; fields of newer versions are ignored."""

    model_config = ConfigDict(extra="ignore")


class InspectorHeader(InspectorPart):
    """Rank and communicator of a call."""

    id: str = Field(default="", max_length=100)
    rank: NonNegativeInt
    n_ranks: PositiveInt


class InspectorMetadata(InspectorPart):
    """Process of a call; missing in RCCL's tests."""

    hostname: str = Field(default="", max_length=253)
    pid: NonNegativeInt = 0


class InspectorCollective(InspectorPart):
    """Data of one call."""

    coll: str
    coll_msg_size_bytes: NonNegativeInt
    coll_exec_time_us: Microseconds | None = None
    coll_algo: str | None = None
    coll_proto: str | None = None


class InspectorRecord(InspectorPart):
    """One line of a file."""

    header: InspectorHeader
    metadata: InspectorMetadata = InspectorMetadata()
    coll_perf: InspectorCollective


class InspectorLog:
    """Reader of one or more files; `communication` returns their content."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.torn_lines = 0
        self.broken_off: str | None = None
        self._members: dict[Membership, None] = {}
        self._choices: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])

    def read(self, path: Path) -> None:
        """Read a file line by line; raises OSError if it cannot be read."""
        log = LogFile(path)
        for block in log:
            for line in block.splitlines():
                if MARK in line:
                    self._line(line)
        self.broken_off = self.broken_off or log.read_error

    def communication(self, axes: Mapping[tuple[int, ...], str] | None = None) -> Communication:
        """Return the traffic; `axes` names groups of world ranks."""
        return Communication(
            source="nccl inspector",
            ranks=len(self.tally.processes),
            rows=self.tally.rows(world_ranks(self._members), axes),
            algorithms=tuple(
                AlgorithmRow(
                    collective=key[0], algorithm=key[1], protocol=key[2], calls=n, num_bytes=size
                )
                for key, (n, size) in sorted(self._choices.items())
            ),
            torn_lines=self.torn_lines,
            broken_off=self.broken_off,
        )

    def _line(self, line: bytes) -> None:
        try:
            record = InspectorRecord.model_validate_json(line)
        except ValidationError:
            self.torn_lines += 1
            return
        header, call = record.header, record.coll_perf
        collective = COLLECTIVES.get(call.coll.encode())
        where = record.metadata
        process = f"{where.hostname}:{where.pid}" if where.pid else f"rank {header.rank}"
        member = Membership(process, header.id or "unnamed", header.n_ranks, header.rank)
        if collective is None or (
            member not in self._members and len(self._members) >= MAX_MEMBERS
        ):
            self.torn_lines += 1
            return
        self._members[member] = None
        parts = header.n_ranks if collective in PER_RANK_COUNTS else 1
        size, took_us = call.coll_msg_size_bytes * parts, call.coll_exec_time_us
        self.tally.add(member, collective, size, 1, None if took_us is None else took_us * 1e-6)
        if call.coll_algo and call.coll_proto and len(self._choices) < MAX_MEMBERS:
            choice = self._choices[collective, call.coll_algo, call.coll_proto]
            choice[0] += 1
            choice[1] += size
