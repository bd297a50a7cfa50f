"""Measuring this machine from beginning to end."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from paceline.core.errors import UserError
from paceline.core.hardware import Dtype
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
    found = measure(names, device, dtype, tell, ranks)
    tell("weighing")
    return weighed(found.about, found.rates, found.timed)


def measure(
    names: Sequence[str], device: str, dtype: Dtype | None, tell: Tell, ranks: Sequence[int] = ()
) -> Measurements:
    """Probes and short trainings on 1, 2, 4, ... ranks (or on `ranks`); `tell` is told what happens.

    Raises UserError for what is not here, SystemFaultError when a program fails.
    """
    found = inventory()
    kind, notices = device_kind(device, found)
    for notice in notices:
        tell(notice)
    recipes = recipes_of(names, kind)
    most = found["cpu"]["usable_cores"] if kind == "cpu" else len(found["gpus"])
    label = found["cpu"]["model"] if kind == "cpu" else found["gpus"][0]["name"]
    known = find_device(label) if kind == "cuda" else None
    entry = "cpu" if kind == "cpu" else (known.name if known else None)
    if entry is None:
        raise UserError(
            label, "is not in the catalog of devices, so there are no rates to begin with"
        )
    chosen: Dtype = dtype or automatic_dtype(entry)
    if known and chosen == "bf16" and known.has_only_fp16:
        raise UserError(label, "does not compute in bf16", remedy="--dtype fp16")
    trained = {
        count: shorts(recipes, found, entry, chosen, count) for count in ranks or _counts(most)
    }
    for count, some in trained.items():
        if not some:
            raise UserError(
                f"--ranks {count}", "has no short training that divides", allowed="1, 2, 4, 8"
            )
    rates: list[Rates] = []
    timed: list[TimedTraining] = []
    for count, some in trained.items():
        threads = local_cluster(found, entry, None, count).threads_per_device
        tell(
            f"probes on {count} x {threads or 1} threads"
            if kind == "cpu"
            else f"probes on {count} GPUs"
        )
        rates.append(programs.rates(sys.executable, kind, chosen, count, threads, recipes))
        tell(f"{len(some)} short trainings of {programs.STEPS} steps each")
        timed += programs.steps(sys.executable, some, count, threads)
    about = About(
        device=label,
        kind="cpu" if kind == "cpu" else "cuda",
        catalog_device=entry,
        dtype=chosen,
        host=platform.node(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=rates[0].lines[0]["torch"],
        cores=found["cpu"]["usable_cores"],
        memory_bytes=found["memory_bytes"],
    )
    return Measurements(about, rates, timed)


def _counts(most: int) -> list[int]:
    """1, 2, 4, ... up to what is here."""
    return [
        2**power for power in range(MOST_RANKS.bit_length()) if 2**power <= min(most, MOST_RANKS)
    ]
