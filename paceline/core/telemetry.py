"""Telemetry of devices during a run, and the energy used between two times."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pydantic import NonNegativeFloat, ValidationError

from paceline.core.hosts import compress
from paceline.core.value import Value

MAX_GAP_S = 5.0
"""Maximum gap between two samples in seconds, or five intervals if that is more. Power in a longer
gap counts as unknown."""
POWER_SOURCE, COUNTER_SOURCE = " power", " energy counter"
"""Suffixes of source names, after the name of the driver: `NVML power`."""


class GpuSample(Value):
    """One sample of one device. None means that the device does not report the value."""

    index: int
    power_w: NonNegativeFloat | None = None
    sm_clock_mhz: NonNegativeFloat | None = None
    memory_clock_mhz: NonNegativeFloat | None = None
    temperature_c: float | None = None
    energy_j: NonNegativeFloat | None = None
    """Energy in joules since the driver was loaded."""
    throttle: tuple[str, ...] | None = None
    """Reasons for clock throttling, such as `power cap` or `thermal`. Empty means no throttling."""
    ecc_uncorrected: NonNegativeFloat | None = None
    """Number of uncorrectable memory errors so far."""


class TelemetryStart(Value):
    """First line of a host's telemetry: sources of the values, and reasons for missing ones."""

    event: Literal["telemetry"] = "telemetry"
    schema_version: Literal[1] = 1
    host: str
    interval_s: NonNegativeFloat
    sources: dict[str, str]
    """Source of the values by part of the host, `gpu` and `cpu`."""
    unknown: dict[str, str]
    """Parts without values, with the reason."""


class TelemetrySample(Value):
    """One sample of all devices of a host."""

    event: Literal["sample"] = "sample"
    time_unix: float
    gpus: tuple[GpuSample, ...] = ()
    cpu_energy_j: NonNegativeFloat | None = None
    """Energy of processors and their memory in joules since the first sample."""
    cpu_clock_mhz: NonNegativeFloat | None = None
    cpu_temperature_c: float | None = None


class Energy(Value):
    """Energy in a time window; None with a reason if it is unknown."""

    energy_j: float | None
    power_w: float | None
    """Mean power over the window."""
    parts_j: dict[str, float]
    """Energy by part of the hosts. Parts that were not measured are absent."""
    window_s: float
    n: int
    """Number of samples in the window."""
    sources: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Telemetry:
    """Telemetry lines of one host."""

    start: TelemetryStart
    samples: tuple[TelemetrySample, ...]


def read_telemetry(lines: Iterable[str]) -> Telemetry | None:
    """Return a host's telemetry; None if its first line is missing.

    Incomplete lines are skipped.
    """
    start: TelemetryStart | None = None
    samples: list[TelemetrySample] = []
    for line in lines:
        try:
            event = json.loads(line).get("event")
            if event == "telemetry":
                start = TelemetryStart.model_validate_json(line)
            elif event == "sample":
                samples.append(TelemetrySample.model_validate_json(line))
        except (ValueError, ValidationError, AttributeError):
            continue
    return Telemetry(start, tuple(sorted(samples, key=lambda s: s.time_unix))) if start else None


def energy_between(
    hosts: Sequence[Telemetry], start: float, stop: float, required_part: str | None = None
) -> Energy:
    """Return the energy in joules of all hosts from `start` to `stop` (Unix time).

    The energy is the integral of linearly interpolated power. If devices have energy counters, the
    counters are interpolated instead. A part with a gap on any host is excluded. Without any part,
    or without the `needed` part, the energy is None and the reason lists all affected hosts.
    """
    parts: dict[str, float] = {}
    sources: set[str] = set()
    reasons = [] if hosts else ["no telemetry was recorded"]
    for part in ("gpu", "cpu") if hosts else ():
        by_host = [_part_j(host, part, start, stop) for host in hosts]
        missing: dict[str, list[str]] = {}
        for host, why in zip(hosts, by_host, strict=True):
            if isinstance(why, str):
                missing.setdefault(why, []).append(host.start.host)
        if not missing:
            measured = [answer for answer in by_host if not isinstance(answer, str)]
            parts[part] = sum(joules for joules, _ in measured)
            sources |= {source for _, source in measured}
        reasons += [
            f"{part}: {compress([*dict.fromkeys(names)])}: {why}" for why, names in missing.items()
        ]
    if required_part is not None and required_part not in parts:
        parts, sources = {}, set()
    total, window_s = sum(parts.values()), stop - start
    inside = [s for host in hosts for s in host.samples if start <= s.time_unix <= stop]
    return Energy(
        energy_j=total if parts else None,
        power_w=total / window_s if parts and window_s > 0 else None,
        parts_j=parts,
        window_s=window_s,
        n=len(inside),
        sources=tuple(sorted(sources)),
        reason=None if parts else "; ".join(reasons),
    )


def _part_j(host: Telemetry, part: str, start: float, stop: float) -> tuple[float, str] | str:
    """Return the joules of one part of a host with their source, or why they are unknown."""
    if part not in host.start.sources:
        return host.start.unknown.get(part, "not recorded")
    uses_counter = part == "cpu" or _counts_gpu_energy(host)
    value = _cpu_energy_j if part == "cpu" else _gpu_energy_j if uses_counter else _gpu_power_w
    points = [(s.time_unix, v) for s in host.samples if (v := value(s)) is not None]
    points = _within(points, start, stop)
    if not points:
        return "was not sampled over the whole window"
    max_gap_s = max(MAX_GAP_S, 5 * host.start.interval_s)
    gap = max(later[0] - earlier[0] for earlier, later in pairwise(points))
    if gap > max_gap_s:
        return f"was not sampled for {gap:.1f} s"
    first, last = _at(points, start), _at(points, stop)
    reported_source = host.start.sources[part]
    source = reported_source if part == "cpu" else _gpu_source(reported_source, uses_counter)
    if uses_counter:
        return (last - first, source) if last >= first else "its energy counter was reset"
    curve = [(start, first), *(p for p in points if start < p[0] < stop), (stop, last)]
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(curve)), source


def _gpu_source(reported_source: str, uses_counter: bool) -> str:
    """Return the source that was used.

    The first sample names the driver and its source, but later samples may lack the energy counter.
    """
    driver = reported_source.removesuffix(POWER_SOURCE).removesuffix(COUNTER_SOURCE)
    return (
        reported_source
        if driver == reported_source
        else driver + (COUNTER_SOURCE if uses_counter else POWER_SOURCE)
    )


def _within(
    points: Sequence[tuple[float, float]], start: float, stop: float
) -> list[tuple[float, float]]:
    """Return the points from the last before the window to the first after it; empty if too few."""
    before = [point for point in points if point[0] <= start]
    after = [point for point in points if point[0] >= stop]
    if not (before and after) or stop <= start:
        return []
    return [point for point in points if before[-1][0] <= point[0] <= after[0][0]]


def _at(points: Sequence[tuple[float, float]], time: float) -> float:
    """Return the value at a time by linear interpolation."""
    for (t0, v0), (t1, v1) in pairwise(points):
        if t0 <= time <= t1:
            return v0 if t1 == t0 else v0 + (v1 - v0) * (time - t0) / (t1 - t0)
    return points[0][1]


def _gpu_power_w(sample: TelemetrySample) -> float | None:
    watts = [gpu.power_w for gpu in sample.gpus]
    readings = [watt for watt in watts if watt is not None]
    return sum(readings) if readings and len(readings) == len(watts) else None


def _counts_gpu_energy(host: Telemetry) -> bool:
    """Return whether every sample has the energy counters of all devices."""
    looks = [sample for sample in host.samples if sample.gpus]
    return bool(looks) and all(_gpu_energy_j(sample) is not None for sample in looks)


def _gpu_energy_j(sample: TelemetrySample) -> float | None:
    joules = [gpu.energy_j for gpu in sample.gpus]
    readings = [counter for counter in joules if counter is not None]
    return sum(readings) if readings and len(readings) == len(joules) else None


def _cpu_energy_j(sample: TelemetrySample) -> float | None:
    return sample.cpu_energy_j
