"""What the telemetry beside a run says of it: energy of a token, throttling, memory errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.core.metrics import ENERGY_PER_TOKEN
from paceline.core.result import Metric, RunVerdict
from paceline.core.steps import Steps
from paceline.core.telemetry import GpuSample, Telemetry, energy_between, read_telemetry
from paceline.core.units import counted
from paceline.files.documents import read_lines
from paceline.machines.probe.telemetry import FOLDER

WH_J = 3600.0
THROTTLED = "throttled"
THROTTLED_SHARE = 0.05
"""Of a device's looks; less is a moment and explains nothing."""


@dataclass(frozen=True)
class RunTelemetry:
    """Every host's telemetry, and when the ranks trained (Unix time)."""

    hosts: tuple[Telemetry, ...]
    begin: float
    end: float

    def looks(self) -> Iterator[tuple[str, GpuSample]]:
        """(host and device, what it told) while the ranks trained."""
        for host in self.hosts:
            for sample in host.samples:
                if self.begin <= sample.time_unix <= self.end:
                    for gpu in sample.gpus:
                        yield f"{host.start.host} device {gpu.index}", gpu


def run_telemetry(folder: Path, begin: float | None, end: float | None) -> RunTelemetry | None:
    """A run folder's telemetry from `begin` to `end`; None where nobody could read anything."""
    files = sorted((folder / FOLDER).glob("*.jsonl"))
    hosts = [host for path in files if (host := read_telemetry(read_lines(path)))]
    if begin is None or end is None or not any(host.start.sources for host in hosts):
        return None
    return RunTelemetry(tuple(hosts), begin, end)


def energy_metrics(
    telemetry: RunTelemetry | None, steps: Steps, device: str | None
) -> dict[str, Metric]:
    """Joules of a token over the whole training; empty without telemetry.

    Energy of all hosts from the moment at which the ranks were ready to the end of the last, over
    the tokens of all steps. None where a step's tokens are unknown, or the energy of what trains:
    of GPUs theirs (the processors' is added where it is told), on CPUs the processors'.
    """
    if telemetry is None:
        return {}
    trains = "cpu" if device == "cpu" else "gpu"
    energy = energy_between(telemetry.hosts, telemetry.begin, telemetry.end, trains)
    tokens = float(np.sum(steps["tokens"]))
    note = energy.reason
    if energy.energy_j is not None and not tokens > 0:
        note = "the tokens of some step are unknown"
    if energy.energy_j is None or note:
        return {ENERGY_PER_TOKEN: Metric(value=None, unit="J/token", note=note)}
    value = energy.energy_j / tokens
    parts = " and ".join(sorted(energy.parts_j))
    window = (
        f"{1e6 * value / WH_J:,.3g} Wh a million tokens; {energy.energy_j:,.4g} J of {parts} in "
        f"{energy.window_s:,.1f} s, from ready to the last rank's end, "
        f"{counted(energy.n, 'sample')}"
    )
    return {
        ENERGY_PER_TOKEN: Metric(
            value=value,
            unit="J/token",
            n=len(steps),
            statistic="sum",
            source=", ".join(energy.sources),
            note=window,
        )
    }


def device_warnings(telemetry: RunTelemetry | None) -> list[str]:
    """That devices were throttled, or met memory errors, while the ranks trained."""
    looks = list(telemetry.looks()) if telemetry else []
    return [*_throttled(looks), *_errors(looks)]


def throttled(verdict: RunVerdict, warnings: Sequence[str]) -> RunVerdict:
    """The verdict, which says so where the devices were throttled."""
    reasons = [warning for warning in warnings if warning.startswith(THROTTLED)]
    if verdict.kind == "invalid" or not reasons:
        return verdict
    sentence = f"{verdict.sentence} The run was {'; '.join(reasons)}."
    return verdict.model_copy(update={"sentence": sentence})


def _throttled(looks: Sequence[tuple[str, GpuSample]]) -> Iterator[str]:
    """The device that was throttled for longest, by each reason."""
    asked = Counter(device for device, gpu in looks if gpu.throttle is not None)
    by_reason: dict[str, Counter[str]] = {}
    for device, gpu in looks:
        for reason in gpu.throttle or ():
            by_reason.setdefault(reason, Counter())[device] += 1
    for reason, counts in sorted(by_reason.items()):
        shares = {device: count / asked[device] for device, count in counts.items()}
        longest = max(shares, key=lambda device: shares[device])
        devices = sum(share >= THROTTLED_SHARE for share in shares.values())
        if devices:
            yield (
                f"{THROTTLED}: {reason} held the clocks of {devices:,} of "
                f"{counted(len(asked), 'device')} down, "
                f"in {shares[longest]:.0%} of the samples on {longest}: the figures are those of "
                "lower clocks"
            )


def _errors(looks: Sequence[tuple[str, GpuSample]]) -> Iterator[str]:
    """Devices whose count of uncorrected errors grew."""
    counts: dict[str, list[float]] = {}
    for device, gpu in looks:
        if gpu.ecc_uncorrected is not None:
            counts.setdefault(device, []).append(gpu.ecc_uncorrected)
    for device, row in counts.items():
        if row[-1] > row[0]:
            errors = counted(round(row[-1] - row[0]), "memory error")
            yield f"{device}: {errors} that could not be corrected"
