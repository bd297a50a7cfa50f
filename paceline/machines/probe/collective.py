"""All-reduce among the devices of this machine: rate, bus rate and latency by payload."""

from __future__ import annotations

from paceline.core.value import Value
from paceline.machines.probe.program import probe_lines

TIME_LIMIT_S = 180.0


class CollectiveRow(Value):
    """One payload; every figure from the median repeat."""

    bytes: float
    bytes_per_s: float
    """Payload / time."""
    bus_bytes_per_s: float
    """Payload / time x 2 (n - 1) / n of n ranks: comparable between numbers of ranks (nccl-tests,
    doc/PERFORMANCE.md)."""
    latency_s: float
    """The time of one all-reduce."""
    n: int
    spread: float
    """1.4826 x MAD / median of the repeats."""


class CollectiveProbe(Value):
    """All payloads among one number of ranks."""

    device_name: str
    torch: str
    backend: str | None
    ranks: int
    rows: tuple[CollectiveRow, ...]


def probe_collective(
    python: str, device: str, ranks: int, threads: int | None, seconds: float
) -> CollectiveProbe:
    """The rates among `ranks` processes here; raises SystemFaultError when the program fails."""
    question = {"device": device, "seconds": seconds}
    lines = probe_lines(
        python,
        "programs.allreduce",
        question,
        ranks=ranks,
        threads=threads,
        limit_s=TIME_LIMIT_S + 4 * seconds,
    )
    names = CollectiveRow.model_fields
    return CollectiveProbe(
        device_name=lines[0]["device_name"],
        torch=lines[0]["torch"],
        backend=lines[0]["backend"],
        ranks=lines[0]["ranks"],
        rows=tuple(CollectiveRow(**{name: line[name] for name in names}) for line in lines),
    )
