"""Evaluation of a run's telemetry: energy per token, throttling, memory errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.core.metrics import ENERGY_PER_TOKEN
from paceline.core.result import Metric, RunVerdict
from paceline.core.steps import Steps
from paceline.core.telemetry import (
    POWER_SOURCE,
    Energy,
    GpuSample,
    Telemetry,
    energy_between,
    read_telemetry,
)
from paceline.core.units import pluralize
from paceline.files.documents import read_lines
from paceline.machines.probe.telemetry import FOLDER

WH_J = 3600.0
THROTTLED = "throttled"
ALIASING_STEPS = 7
"""Step time in sampling intervals from which the error of sampled power is below 1.3%."""
THROTTLED_SHARE = 0.05
"""Minimum fraction of a device's samples for a throttling warning."""


@dataclass(frozen=True)
class RunTelemetry:
    """Telemetry of all hosts, and the Unix times between which the ranks trained."""

    hosts: tuple[Telemetry, ...]
    begin: float
    end: float

    def device_samples(self) -> Iterator[tuple[str, GpuSample]]:
        """Yield (host and device, sample) while the ranks trained."""
        for host in self.hosts:
            for sample in host.samples:
                if self.begin <= sample.time_unix <= self.end:
                    for gpu in sample.gpus:
                        yield f"{host.start.host} device {gpu.index}", gpu


def run_telemetry(folder: Path, begin: float | None, end: float | None) -> RunTelemetry | None:
    """Return a run's telemetry from `begin` to `end` (Unix times); None if there is none."""
    files = sorted((folder / FOLDER).glob("*.jsonl"))
    hosts = [host for path in files if (host := read_telemetry(read_lines(path)))]
    if begin is None or end is None or not any(host.start.sources for host in hosts):
        return None
    return RunTelemetry(tuple(hosts), begin, end)


def energy_metrics(
    telemetry: RunTelemetry | None, steps: Steps, device: str | None
) -> dict[str, Metric]:
    """Return joules per token over the whole training; empty without telemetry.

    Energy of all hosts from the start of the first rank to the end of the last, divided by the
    tokens of all steps. GPU runs count GPU energy, and CPU energy if it was recorded; CPU runs
    count CPU energy. The value is None if a step's tokens or that energy are unknown.
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
        f"{1e6 * value / WH_J:,.3g} Wh per million tokens; {energy.energy_j:,.4g} J of {parts} in "
        f"{energy.window_s:,.1f} s, from the first start to the last end of a rank, "
        f"{pluralize(energy.n, 'sample')}{_sampling_error(telemetry, energy, steps)}"
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


def _sampling_error(telemetry: RunTelemetry, energy: Energy, steps: Steps) -> str:
    """Return the error of power that is sampled about as often as steps end; "" if it is small."""
    interval_s = max(host.start.interval_s for host in telemetry.hosts)
    samples_power = any(source.endswith(POWER_SOURCE) for source in energy.sources)
    if not samples_power or float(np.median(steps["step_time_s"])) >= ALIASING_STEPS * interval_s:
        return ""
    return (
        f"; power was sampled every {interval_s:g} s: step times near a multiple or "
        "fraction of that can bias the energy by 17% (43% at worst)"
    )


def device_warnings(telemetry: RunTelemetry | None) -> list[str]:
    """Return warnings about throttled devices and memory errors during the training."""
    samples = list(telemetry.device_samples()) if telemetry else []
    return [*_throttle_warnings(samples), *_memory_error_warnings(samples)]


def with_throttling(verdict: RunVerdict, warnings: Sequence[str]) -> RunVerdict:
    """Return the verdict with a sentence about throttled devices."""
    reasons = [warning for warning in warnings if warning.startswith(THROTTLED)]
    if verdict.kind == "invalid" or not reasons:
        return verdict
    sentence = f"{verdict.sentence} The run was {'; '.join(reasons)}."
    return verdict.model_copy(update={"sentence": sentence})


def _throttle_warnings(samples: Sequence[tuple[str, GpuSample]]) -> Iterator[str]:
    """Yield a warning for each throttle reason, with the device that was throttled longest."""
    num_samples = Counter(device for device, gpu in samples if gpu.throttle is not None)
    by_reason: dict[str, Counter[str]] = {}
    for device, gpu in samples:
        for reason in gpu.throttle or ():
            by_reason.setdefault(reason, Counter())[device] += 1
    for reason, counts in sorted(by_reason.items()):
        shares = {device: count / num_samples[device] for device, count in counts.items()}
        longest = max(shares, key=lambda device: shares[device])
        devices = sum(share >= THROTTLED_SHARE for share in shares.values())
        if devices:
            yield (
                f"{THROTTLED}: {reason} reduced the clocks of {devices:,} of "
                f"{pluralize(len(num_samples), 'device')}, in {shares[longest]:.0%} of the samples "
                f"on {longest}: the results were measured at lower clocks"
            )


def _memory_error_warnings(samples: Sequence[tuple[str, GpuSample]]) -> Iterator[str]:
    """Yield a warning for each device whose count of uncorrected errors grew."""
    counts: dict[str, list[float]] = {}
    for device, gpu in samples:
        if gpu.ecc_uncorrected is not None:
            counts.setdefault(device, []).append(gpu.ecc_uncorrected)
    for device, row in counts.items():
        if row[-1] > row[0]:
            errors = pluralize(round(row[-1] - row[0]), "memory error")
            yield f"{device}: {errors} (uncorrectable)"
