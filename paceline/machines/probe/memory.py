"""The rate at which a device copies its memory: what optimizers and normalisations live on."""

from __future__ import annotations

from paceline.core.value import Value
from paceline.machines.probe.program import probe_lines

TIME_LIMIT_S = 120.0


class BandwidthRow(Value):
    """Copies of one size."""

    bytes: float
    """Copied at once."""
    bytes_per_s: float
    """Read and written together: the median over blocks of copies."""
    n: int
    spread: float
    """1.4826 x MAD / median of the blocks."""


class BandwidthProbe(Value):
    """All sizes on one device; the largest lies beyond the caches."""

    device_name: str
    torch: str
    threads: int
    rows: tuple[BandwidthRow, ...]


def probe_memory(python: str, device: str, threads: int | None, seconds: float) -> BandwidthProbe:
    """The copy rates of one device; raises SystemFaultError when the program fails."""
    question = {"device": device, "seconds": seconds}
    lines = probe_lines(
        python, "programs.bandwidth", question, threads=threads, limit_s=TIME_LIMIT_S + 4 * seconds
    )
    names = BandwidthRow.model_fields
    return BandwidthProbe(
        device_name=lines[0]["device_name"],
        torch=lines[0]["torch"],
        threads=lines[0]["threads"],
        rows=tuple(BandwidthRow(**{name: line[name] for name in names}) for line in lines),
    )
