"""Telemetry of devices during a run, and the energy used between two times."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
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
        except (ValueError, ValidationError, AttributeError, RecursionError):
            continue
    return Telemetry(start, tuple(sorted(samples, key=lambda s: s.time_unix))) if start else None


def energy_between(
    hosts: Sequence[Telemetry], start: float, stop: float, required_part: str | None = None
) -> Energy:
    """Return the energy in joules of all hosts from `start` to `stop` (Unix time).

    The energy is the integral of linearly interpolated power of each device. If all devices have
    energy counters that are never reset, the counters are interpolated instead. A part with a gap
    on any host is excluded. Without any part, or without the `required_part`, the energy is None
    and the reason lists all affected hosts.
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
    source = host.start.sources[part]
    if part == "cpu":
        points = [
            (sample.time_unix, sample.cpu_energy_j)
            for sample in host.samples
            if sample.cpu_energy_j is not None
        ]
        answer = _integral_j(points, True, start, stop, host.start.interval_s)
        return answer if isinstance(answer, str) else (answer, source)
    gpus = [gpu for sample in host.samples for gpu in sample.gpus]
    has_counters = bool(gpus) and all(gpu.energy_j is not None for gpu in gpus)
    # The first sample names the driver and its source, but later samples may lack the counter.
    driver = source.removesuffix(POWER_SOURCE).removesuffix(COUNTER_SOURCE)
    reasons: list[str] = []
    for uses_counter in (True, False) if has_counters else (False,):
        answer = _gpus_j(host, uses_counter, start, stop)
        if not isinstance(answer, str):
            suffix = COUNTER_SOURCE if uses_counter else POWER_SOURCE
            return answer, source if driver == source else driver + suffix
        reasons.append(answer)
    return reasons[0]


def _gpus_j(host: Telemetry, uses_counter: bool, start: float, stop: float) -> float | str:
    """Return the joules of all devices of a host, or why those of a device are unknown.

    Each device is integrated alone, because some samples may lack a device.
    """
    readings: dict[int, list[tuple[float, float]]] = {}
    for sample in host.samples:
        for gpu in sample.gpus:
            value = gpu.energy_j if uses_counter else gpu.power_w
            points = readings.setdefault(gpu.index, [])
            if value is not None:
                points.append((sample.time_unix, value))
    total_j = 0.0
    for index, points in sorted((readings or {0: []}).items()):
        answer = _integral_j(points, uses_counter, start, stop, host.start.interval_s)
        if isinstance(answer, str):
            return answer if len(readings) < 2 else f"device {index} {answer}"
        total_j += answer
    return total_j


def _integral_j(
    points: Sequence[tuple[float, float]],
    uses_counter: bool,
    start: float,
    stop: float,
    interval_s: float,
) -> float | str:
    """Return the joules of one device from its readings (time, value), or why they are unknown."""
    times, readings = np.array(points, dtype=float).reshape(-1, 2).T
    if stop <= start or not (len(times) and times[0] <= start and stop <= times[-1]):
        return "was not sampled over the whole window"
    around = slice(np.searchsorted(times, start, "right") - 1, np.searchsorted(times, stop) + 1)
    gap = float(np.diff(times[around]).max())
    if gap > max(MAX_GAP_S, 5 * interval_s):
        return f"was not sampled for {gap:.1f} s"
    if uses_counter and (np.diff(readings[around]) < 0).any():
        return "has an energy counter that was reset"
    grid = np.array([start, *times[(times > start) & (times < stop)], stop])
    curve = np.interp(grid, times, readings)
    return float(curve[-1] - curve[0] if uses_counter else np.trapezoid(curve, grid))
