"""Output of nccl-tests, rccl-tests and perftest, read into the report of a network measurement.

The formats are those of the programs' sources: nccl-tests, src/util.cu, and perftest,
src/perftest_parameters.h.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from paceline.core.errors import UserError, unreadable
from paceline.core.units import MIB
from paceline.files import catalog
from paceline.files.log_file import LogFile
from paceline.files.nominal_links import nominal_fabric
from paceline.scaling.network.readings import (
    OPERATIONS,
    CollectiveTiming,
    PairRow,
    bus_factor,
)
from paceline.scaling.network.report import NetworkReport, network_report

PROGRAMS = {f"{name}_perf": name for name in OPERATIONS} | {
    "alltoall_perf": "all_to_all",
    "sendrecv_perf": "send_recv",
}
_PROGRAM = re.compile(r"\b([a-z_]+_perf)\b")
_RANK = re.compile(
    r"#\s+Rank\s+\d+\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^]]*\](.*)"
)
_PORT_HEADER = re.compile(r"#bytes\s.*BW average\[(MB|MiB|Gb)/sec\]")
_PORT_BYTES = {"MB": MIB, "MiB": MIB, "Gb": 1e9 / 8}
"""Bytes of a unit. perftest divides by 2^20 also in the versions that print MB/sec."""
MAX_BUS_DIFFERENCE = 0.03
"""Relative difference between printed and computed bus bandwidth that rounding can explain."""
MAX_FAULTS = 100
MAX_ENTRIES = 20_000
"""Maximum number of results, and of ranks, in one file."""
MIN_COMPARED_BUS = 1.0
"""Bus bandwidth in GB/s from which on its two decimals are precise enough to compare."""
TRAITS = {
    "all_reduce": (True, False, True),
    "reduce_scatter": (True, False, True),
    "send_recv": (True, False, False),
    "all_gather": (False, False, True),
    "all_to_all": (False, False, False),
    "broadcast": (False, True, True),
    "reduce": (True, True, True),
}
"""Operator printed, root printed, in-place result checked (nccl-tests, src/*.cu)."""


@dataclass
class _Output:
    """Results and settings in the lines read so far."""

    where: str
    program: str | None = None
    ranks: list[tuple[str, str, str]] = field(default_factory=list)
    """Group, host and device of each rank."""
    columns: list[str] = field(default_factory=list)
    port_unit: str | None = None
    both_directions: bool = False
    rows: list[_Row] = field(default_factory=list)
    ports: list[PairRow] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def read(self, line: str, number: int) -> None:
        if len(self.ranks) + len(self.rows) + len(self.ports) > MAX_ENTRIES:
            raise UserError(
                f"{self.where}:{number}",
                f"more than {MAX_ENTRIES:,} ranks and results",
                remedy="give the output of one run",
            )
        if match := _RANK.match(line):
            self.ranks.append((match[1] or "0", match[2], match[3].strip()))
        elif line.startswith("# Using devices"):
            self.ranks = []
        elif line.startswith("#") and " algbw " in line:
            self.columns = line.lstrip("#").split()
            if "cputime" in self.columns:
                raise UserError(f"{self.where}:{number}", "shows CPU times (-C), not durations")
        elif line.startswith("# Out of bounds values") and "FAILED" in line:
            fault = f"{self.program or 'a collective'}: {line.lstrip('# ').strip()}"
            self.faults = list(dict.fromkeys([*self.faults[:MAX_FAULTS], fault]))
        elif match := _PORT_HEADER.search(line):
            self.port_unit = match[1]
        elif " BW Test" in line:
            self.both_directions = "Bidirectional" in line
        elif match := _PROGRAM.search(line):
            self.program = match[1]
        elif self.port_unit and re.match(r"\s*\d+\s+\d{1,18}\s+[\d.]+\s+\d{1,12}\.\d+\s", line):
            self._read_port(line.split(), _PORT_BYTES[self.port_unit])
        elif self.columns and re.match(r"\s*\d+\s+\d+\s+\w+\s", line):
            self._read_row(line.split(), number)

    def _read_port(self, cells: list[str], unit: float) -> None:
        rate = float(cells[3]) * unit / (2 if self.both_directions else 1)
        if rate <= 0:
            return
        self.ports.append(
            PairRow(
                source="client",
                target="server",
                latency_s=None,
                bytes_per_s=rate,
                devices=1,
                n=int(cells[1]),
            )
        )

    def _read_row(self, cells: list[str], number: int) -> None:
        if len(cells) < len(self.columns) - 1:  # The last column may be an empty time stamp.
            return
        cells = cells[: len(self.columns)]
        pairs = list(zip(reversed(self.columns), reversed(cells), strict=False))
        where = f"{self.where}:{number}"
        self.rows.append(_Row(where, dict(pairs), dict(reversed(pairs)), self.program, self.ranks))

    def collectives(self) -> Iterator[CollectiveTiming]:
        """Yield the out-of-place result of each row."""
        fallback: str | None = None
        if without_program := [row for row in self.rows if row.program is None]:
            fallback = max(without_program, key=lambda row: row.bus).inferred_operation()
        for row in self.rows:
            if (timing := row.timing(fallback)) is not None:
                yield timing


@dataclass(frozen=True)
class _Row:
    """Row of a table of collectives."""

    where: str
    out_of_place: dict[str, str]
    in_place: dict[str, str]
    program: str | None
    all_ranks: list[tuple[str, str, str]]

    @property
    def bus(self) -> float:
        """Printed bus bandwidth in GB/s; 0 if it is not a number."""
        try:
            return float(self.out_of_place["busbw"])
        except (KeyError, ValueError):
            return 0.0

    def timing(self, fallback: str | None) -> CollectiveTiming | None:
        """Return the result of the row, None for an empty one."""
        row = self.out_of_place
        try:
            size, time_us, printed = int(row["size"]), float(row["time"]), float(row["busbw"])
            wrong = int(float(row.get("#wrong", "0").replace("N/A", "0")))
            rate = size / (time_us * 1e-6)
        except (KeyError, ValueError, ArithmeticError) as error:
            raise UserError(
                self.where, f"does not match the header of the table ({error})"
            ) from error
        if not (size > 0 and 0 < rate < inf):
            return None
        operation, ranks = self._operation(fallback), self._ranks()
        bus = rate * bus_factor(operation, ranks)
        if not _agree(bus / 1e9, printed):
            raise UserError(
                self.where,
                f"prints a bus bandwidth of {printed:g} GB/s, but {OPERATIONS[operation]} of "
                f"{ranks} ranks has {bus / 1e9:.2f} GB/s at this time",
                remedy="give the output of one run, with its lines `# Rank` and program name",
            )
        return CollectiveTiming(
            operation=operation,
            bytes=size,
            ranks=ranks,
            latency_s=time_us * 1e-6,
            slowest_s=None,
            bytes_per_s=rate,
            bus_bytes_per_s=bus,
            n=1,
            spread=None,
            wrong=wrong,
        )

    def inferred_operation(self) -> str | None:
        """Return the operation of a table without its program, if its columns decide.

        The bus factor, the operator, the root and the check of in-place results differ.
        """
        row, in_place = self.out_of_place, self.in_place
        if self.bus < MIN_COMPARED_BUS or "redop" not in row or "#wrong" not in in_place:
            return None
        if row.get("#wrong", "N/A") == "N/A":
            return None
        traits = (row["redop"] != "none", row.get("root") != "-1", in_place["#wrong"] != "N/A")
        try:
            rate = float(row["algbw"])
        except (KeyError, ValueError):
            return None
        operations = [
            operation
            for operation, each in TRAITS.items()
            if each == traits and _agree(rate * bus_factor(operation, self._ranks()), self.bus)
        ]
        return operations[0] if len(operations) == 1 else None

    def _operation(self, fallback: str | None) -> str:
        if self.program is None and fallback:
            return fallback
        if self.program not in PROGRAMS:
            raise UserError(
                self.where,
                f"is of {self.program}"
                if self.program
                else "does not name its program, and its columns do not decide it",
                allowed=f"the output of {', '.join(PROGRAMS)}, with the command or its first lines",
                remedy=None if self.program else "write the program's name in a line above it",
            )
        return PROGRAMS[self.program]

    def _ranks(self) -> int:
        first_group = [group for group, _, _ in self.all_ranks if group == self.all_ranks[0][0]]
        if len(first_group) < 2:
            raise UserError(self.where, "has no lines `# Rank` of two or more ranks above it")
        return len(first_group)


def _agree(bus: float, printed: float) -> bool:
    """Return whether a bus bandwidth in GB/s rounds to the printed one, or is too small to tell."""
    return printed < MIN_COMPARED_BUS or abs(bus / printed - 1) <= MAX_BUS_DIFFERENCE


def read_benchmark(path: Path, intra: str | None, inter: str | None) -> NetworkReport:
    """Return the report of the output at `path`; `intra` and `inter` are the stated links.

    Raises UserError for a file without results, and for a bus bandwidth that does not follow from
    the time.
    """
    output = _Output(str(path))
    number = 0
    try:
        for block in LogFile(path):
            for line in block.decode("utf-8", "replace").replace("\r", "\n").splitlines():
                number += 1
                output.read(line, number)
    except OSError as error:
        raise unreadable(str(path), error) from error
    collectives = tuple(output.collectives())
    if not collectives and not output.ports:
        raise UserError(
            str(path),
            "holds no results of nccl-tests, rccl-tests or perftest",
            allowed="the output of e.g. all_reduce_perf or ib_write_bw",
        )
    hosts = Counter(host for _, host, _ in output.ranks)
    per_node = max(hosts.values(), default=1)
    return network_report(
        collectives=collectives,
        pairs=tuple(_best(output.ports)),
        identity={
            "device": _device({name for _, _, name in output.ranks}),
            "nodes": len(hosts) or 2,
            "devices_per_node": per_node,
        },
        created=datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds"),
        elapsed_s=None,
        faults=output.faults,
        fabric=nominal_fabric(intra, inter, per_node),
    )


def _best(ports: Iterable[PairRow]) -> list[PairRow]:
    """Return the fastest message size of a port."""
    return sorted(ports, key=lambda row: -row.bytes_per_s)[:1]


def _device(names: set[str]) -> str:
    """Return the catalog's name of the devices, or the printed one."""
    if len(names) != 1:
        return "mixed devices" if names else "port"
    (name,) = names
    try:
        return catalog.device(name).name
    except UserError:
        return name or "device"
