"""Measuring this machine from beginning to end."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from paceline.core.errors import UserError
from paceline.core.hardware import Dtype
from paceline.core.units import counted
from paceline.estimate.calibrate import programs
from paceline.estimate.calibrate.calibration import About, Calibration
from paceline.estimate.calibrate.cases import recipes_of, shorts
from paceline.estimate.calibrate.lookup import automatic_dtype
from paceline.estimate.calibrate.programs import Measurements, Rates, TimedTraining
from paceline.estimate.calibrate.weighting import weighed
from paceline.machines.placement import device_kind, find_device
from paceline.machines.probe.inventory import inventory, local_cluster

MOST_RANKS = 8
Tell = Callable[[str], None]


def calibrate(
    names: Sequence[str], device: str, dtype: Dtype | None, tell: Tell, ranks: Sequence[int] = ()
) -> Calibration:
    """Measure on 1, 2, 4, ... ranks (or on `ranks`) and weigh it; raises as `measure` does."""
    measurements = measure(names, device, dtype, tell, ranks)
    tell("weighing")
    return weighed(measurements.about, measurements.rates, measurements.timed)


def measure(
    names: Sequence[str], device: str, dtype: Dtype | None, tell: Tell, ranks: Sequence[int] = ()
) -> Measurements:
    """Probes and short trainings on 1, 2, 4, ... ranks (or on `ranks`); `tell` hears what happens.

    Raises UserError for what is not here, SystemFaultError when a program fails.
    """
    machine = inventory()
    kind, notices = device_kind(device, machine)
    for notice in notices:
        tell(notice)
    recipes = recipes_of(names, kind)
    most = machine["cpu"]["usable_cores"] if kind == "cpu" else len(machine["gpus"])
    label = machine["cpu"]["model"] if kind == "cpu" else machine["gpus"][0]["name"]
    gpu = find_device(label) if kind == "cuda" else None
    entry = "cpu" if kind == "cpu" else (gpu.name if gpu else None)
    if entry is None:
        raise UserError(
            label, "is not in the catalog of devices, so there are no rates to begin with"
        )
    dtype = dtype or automatic_dtype(entry)
    if gpu and dtype == "bf16" and gpu.has_only_fp16:
        raise UserError(label, "does not compute in bf16", remedy="--dtype fp16")
    trainings = {
        count: shorts(recipes, machine, entry, dtype, count) for count in ranks or _counts(most)
    }
    for count, of_count in trainings.items():
        if not of_count:
            raise UserError(
                f"--ranks {count}", "has no short training that divides", allowed="1, 2, 4, 8"
            )
    rates: list[Rates] = []
    timed: list[TimedTraining] = []
    for count, of_count in trainings.items():
        threads = local_cluster(machine, entry, None, count).threads_per_device
        tell(
            f"probes on {count} x {counted(threads or 1, 'thread')}"
            if kind == "cpu"
            else f"probes on {counted(count, 'GPU')}"
        )
        rates.append(programs.rates(sys.executable, kind, dtype, count, threads, recipes))
        tell(f"{counted(len(of_count), 'short training')} of {programs.STEPS} steps each")
        timed += programs.steps(sys.executable, of_count, count, threads)
    about = About(
        device=label,
        kind="cpu" if kind == "cpu" else "cuda",
        catalog_device=entry,
        dtype=dtype,
        host=platform.node(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=rates[0].lines[0]["torch"],
        cores=machine["cpu"]["usable_cores"],
        memory_bytes=machine["memory_bytes"],
    )
    return Measurements(about, rates, timed)


def _counts(most: int) -> list[int]:
    """1, 2, 4, ... up to the most ranks that the machine has cores or GPUs for."""
    return [
        2**power for power in range(MOST_RANKS.bit_length()) if 2**power <= min(most, MOST_RANKS)
    ]
