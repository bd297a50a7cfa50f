"""Calibration of this machine: probes, short training runs, and the fit."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hardware import Dtype
from paceline.core.layout import MODEL_AXES
from paceline.core.run import RunSpec
from paceline.core.stats import summarize
from paceline.core.units import pluralize
from paceline.engines import native
from paceline.estimate.calibrate.calibration import (
    About,
    CalibratedStep,
    Calibration,
    Placement,
    cpu_machine,
)
from paceline.estimate.calibrate.cases import (
    ShortTraining,
    attention_sizes,
    gemm_sizes,
    recipes_of,
    short_trainings,
)
from paceline.estimate.calibrate.lookup import automatic_dtype
from paceline.estimate.fit.evidence import Evidence, shipped_evidence
from paceline.estimate.fit.interval import slopes
from paceline.estimate.fit.posterior import predict
from paceline.estimate.fit.refit import (
    NOISE,
    Probes,
    cpu_prior,
    inseparable_coefficients,
    probe_errors,
    refit,
    undetermined_coefficients,
)
from paceline.estimate.model.case import Case, cases_of
from paceline.estimate.model.coefficients import NAMES
from paceline.estimate.model.machine import Machine, machine
from paceline.estimate.run_case import case_of, software_of
from paceline.files.recipe import Recipe
from paceline.files.temporary import temporary_folder
from paceline.machines.placement import device_kind, find_device
from paceline.machines.probe.inventory import inventory, local_cluster
from paceline.machines.probe.program import probe_lines

PROBES_S = 10.0
"""Duration in seconds of the probes of one number of ranks, without their start."""
STEPS, SKIPPED_STEPS = 8, 2
"""Number of steps of a short training run, and of its first steps that do not count, because they
touch memory for the first time and choose kernels."""
LIMIT_S = 600.0
PAYLOADS = {"cpu": (4096, 2**16, 2**20, 2**23), "cuda": (4096, 2**20, 2**24, 2**28)}
"""Sizes of the all-reduces in bytes; only large ones saturate the links between GPUs."""


@dataclass(frozen=True)
class Rates:
    """Probe results of one placement, as printed by the probe programs."""

    lines: Sequence[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of one event."""
        return [line for line in self.lines if line["event"] == event]

    @property
    def placement(self) -> Placement:
        """Rates of each rank; raises SystemFaultError if a large GEMM failed."""
        if not self.of("gemm"):
            reason = (self.of("skipped") or [{"reason": "nothing"}])[0]["reason"]
            raise SystemFaultError("gemm probe", str(reason))
        large = self.of("collective")
        return Placement(
            ranks=self.lines[0]["ranks"],
            threads=self.lines[0]["threads"],
            flops_per_s=self.of("gemm")[0]["flops_per_s"],
            memory_bytes_per_s=self.of("memory")[0]["bytes_per_s"],
            link_bytes_per_s=max((line["bus_bytes_per_s"] for line in large), default=None),
        )


@dataclass(frozen=True)
class TimedTraining:
    """Short training run with its step time."""

    short: ShortTraining
    seconds: float
    n: int
    spread: float


@dataclass(frozen=True)
class Measurements:
    """All measurements of one machine."""

    about: About
    rates: Sequence[Rates]
    trainings: Sequence[TimedTraining]


def probe_rates(
    python: str, kind: str, dtype: Dtype, ranks: int, threads: int | None, recipes: Sequence[Recipe]
) -> Rates:
    """Run all probes in `ranks` processes at once; raises SystemFaultError if they fail."""
    request = {
        "device": kind,
        "dtype": dtype,
        "threads": threads,
        "seconds": PROBES_S,
        "payloads": PAYLOADS[kind],
        "products": gemm_sizes(recipes),
        "attention": attention_sizes(recipes),
    }
    return Rates(
        probe_lines(
            python, "programs.calibration", request, ranks=ranks, threads=threads, limit_s=LIMIT_S
        )
    )


def time_steps(
    python: str, short_trainings: Sequence[ShortTraining], ranks: int, threads: int | None
) -> list[TimedTraining]:
    """Return the step times of short training runs on `ranks` ranks, run one after the other."""
    cases = [
        {"name": short.name, "settings": native.settings(short.spec), "steps": STEPS}
        for short in short_trainings
    ]
    if not cases:
        return []
    with temporary_folder() as folder:
        path = Path(folder) / "cases.json"
        path.write_text(json.dumps({"cases": cases}), encoding="utf-8")
        lines = probe_lines(
            python,
            "programs.step_times",
            {"file": str(path)},
            ranks=ranks,
            threads=threads,
            limit_s=LIMIT_S,
        )
    times = {line["name"]: line["times_s"] for line in lines}
    return [_timed_training(short, times[short.name]) for short in short_trainings]


def _timed_training(short: ShortTraining, times_s: Sequence[float]) -> TimedTraining:
    summary = summarize(np.array(times_s[SKIPPED_STEPS:]))
    return TimedTraining(
        short, summary.median, STEPS - SKIPPED_STEPS, summary.relative_spread or 0.0
    )


MIN_SLOPE = 1e-3
"""Minimum slope of a step time's logarithm over the coefficient's. A coefficient below it for all
short training runs belongs to another device or framework."""


def prior(kind: str, dtype: Dtype) -> Evidence:
    """Return the coefficients before any measurement."""
    return cpu_prior(dtype) if kind == "cpu" else shipped_evidence()


def fit_calibration(
    about: About, rates: Sequence[Rates], steps: Sequence[TimedTraining]
) -> Calibration:
    """Return the calibration: the prior of such devices, fitted to probes and steps together."""
    before = prior(about.kind, about.dtype)
    facts = about.model_dump()
    unfitted_calibration = Calibration(
        **facts,
        placements=tuple(rank_rates.placement for rank_rates in rates),
        probes=0,
        steps=(),
        undetermined_coefficients=(),
        inseparable_coefficients=(),
        evidence=before,
    )
    cases = [case_here(training.short.spec, unfitted_calibration) for training in steps]
    probes = [_probes(rank_rates, cases) for rank_rates in rates]
    count = sum(rank_rates.size for rank_rates in probes)
    x, measured = cases_of(cases), np.array([training.seconds for training in steps])
    noise = np.array([np.hypot(NOISE, training.spread / np.sqrt(training.n)) for training in steps])
    title = (
        f"{len(steps)} short training runs and {count} probes of {about.device}, {about.dtype}, "
        f"{about.date[:10]}"
    )
    after = refit(before, x, measured, title, noise, probe_errors(probes))
    predicted = predict(x, after.fit().centre)
    matters = np.abs(slopes(x, before.fit().centre)).max(axis=0) > MIN_SLOPE
    relevant = [name for name, yes in zip(NAMES, matters.tolist(), strict=True) if yes]
    return unfitted_calibration.model_copy(
        update={
            "probes": count,
            "steps": tuple(
                _calibrated_step(*row) for row in zip(steps, predicted.tolist(), strict=True)
            ),
            "undetermined_coefficients": tuple(
                name for name in undetermined_coefficients(before, after) if name in relevant
            ),
            "inseparable_coefficients": tuple(inseparable_coefficients(before, after)),
            "evidence": after,
        }
    )


def machine_here(calibration: Calibration, ranks: int) -> Machine:
    """Return this machine for `ranks` ranks."""
    if calibration.kind == "cpu":
        return cpu_machine(calibration, ranks)
    return machine(calibration.catalog_device, devices_per_node=max(1, ranks))


def case_here(spec: RunSpec, calibration: Calibration) -> Case:
    """Return the time model's case for a run on this machine."""
    return case_of(spec, machine_here(calibration, spec.world_size), software_of(spec))


def _probes(rates: Rates, cases: Sequence[Case]) -> Probes:
    """Return one placement's probes, with the rates of its short training runs."""
    ranks = rates.placement.ranks
    case = next(case for case in cases if case.devices == ranks)
    plain = replace(
        case,
        **dict.fromkeys(MODEL_AXES, 1),
        zero_stage=0,
        full_recompute=False,
        selective_recompute=False,
    )
    latency, overlap = rates.of("latency"), rates.of("overlap")
    return Probes(
        plain,
        gemms=[
            (*map(float, line["shape"]), line["forward_s"] + line["backward_s"], line["spread"])
            for line in rates.of("product")
        ],
        attention=[
            (*map(float, line["shape"]), line["forward_s"] + line["backward_s"], line["spread"])
            for line in rates.of("attention")
        ],
        copies=[(line["bytes_per_s"], line["spread"]) for line in rates.of("memory")],
        exchanges=[
            (line["bytes"], line["latency_s"], line["spread"]) for line in rates.of("collective")
        ],
        latency_s=latency[0]["seconds"] if latency else None,
        exposed=overlap[0]["exposed"] if overlap else None,
    )


def _calibrated_step(training: TimedTraining, predicted_s: float) -> CalibratedStep:
    spec = training.short.spec
    return CalibratedStep(
        recipe=training.short.recipe,
        layers=spec.model.num_layers,
        layout=training.short.layout_label,
        ranks=spec.world_size,
        threads=spec.cluster.threads_per_device or 1,
        measured_s=training.seconds,
        n=training.n,
        spread=training.spread,
        predicted_s=predicted_s,
    )


RANKS = (1, 2, 4, 8)
"""Numbers of ranks that are measured by default, as far as there are cores or GPUs."""
ReportProgress = Callable[[str], None]


def calibrate(
    names: Sequence[str],
    device: str,
    dtype: Dtype | None,
    report_progress: ReportProgress,
    ranks: Sequence[int] = (),
) -> Calibration:
    """Measure on 1, 2, 4, ... ranks (or on `ranks`) and fit the coefficients.

    Raises the errors of `measure`.
    """
    measurements = measure(names, device, dtype, report_progress, ranks)
    report_progress("fitting")
    return fit_calibration(measurements.about, measurements.rates, measurements.trainings)


def measure(
    names: Sequence[str],
    device: str,
    dtype: Dtype | None,
    report_progress: ReportProgress,
    ranks: Sequence[int] = (),
) -> Measurements:
    """Run probes and short training runs on 1, 2, 4, ... ranks (or on `ranks`).

    `report_progress` receives messages. Raises UserError for a device, recipe or rank count that is
    not available, SystemFaultError if a program fails.
    """
    machine = inventory()
    kind, notices = device_kind(device, machine)
    for notice in notices:
        report_progress(notice)
    recipes = recipes_of(names, kind)
    max_ranks = machine["cpu"]["usable_cores"] if kind == "cpu" else len(machine["gpus"])
    label = machine["cpu"]["model"] if kind == "cpu" else machine["gpus"][0]["name"]
    gpu = find_device(label) if kind == "cuda" else None
    entry = "cpu" if kind == "cpu" else (gpu.name if gpu else None)
    if entry is None:
        raise UserError(label, "is not in the catalog of devices, so its peak rates are unknown")
    dtype = dtype or automatic_dtype(entry)
    if gpu and dtype == "bf16" and gpu.has_only_fp16:
        raise UserError(label, "does not compute in bf16", remedy="--dtype fp16")
    trainings = {
        count: short_trainings(recipes, machine, entry, dtype, count)
        for count in ranks or [n for n in RANKS if n <= max_ranks]
    }
    for count, of_count in trainings.items():
        if not of_count:
            raise UserError(
                f"--ranks {count}",
                "fits no short training run",
                allowed=", ".join(map(str, RANKS)),
            )
    rates: list[Rates] = []
    timed_trainings: list[TimedTraining] = []
    for count, of_count in trainings.items():
        threads = local_cluster(machine, entry, None, count).threads_per_device
        report_progress(
            f"probes on {count} x {pluralize(threads or 1, 'thread')}"
            if kind == "cpu"
            else f"probes on {pluralize(count, 'GPU')}"
        )
        rates.append(probe_rates(sys.executable, kind, dtype, count, threads, recipes))
        report_progress(f"{pluralize(len(of_count), 'short training run')} of {STEPS} steps each")
        timed_trainings += time_steps(sys.executable, of_count, count, threads)
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
    return Measurements(about, rates, timed_trainings)
