"""From what was measured to coefficients, and to the file that keeps both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.core.hardware import Dtype
from paceline.core.run import RunSpec
from paceline.estimate.calibrate.calibration import About, CalibratedStep, Calibration, cpu_machine
from paceline.estimate.calibrate.programs import Rates, TimedTraining
from paceline.estimate.fit.evidence import Evidence, shipped
from paceline.estimate.fit.interval import slopes
from paceline.estimate.fit.posterior import predict
from paceline.estimate.fit.probes import Probes, errors
from paceline.estimate.fit.processors import cpu_prior
from paceline.estimate.fit.refit import NOISE, alike, refit, unmoved
from paceline.estimate.model.case import Case, cases_of
from paceline.estimate.model.coefficients import NAMES
from paceline.estimate.model.machine import Machine, machine
from paceline.estimate.run_case import case_of, software_of

LEAST_SLOPE = 1e-3
"""A coefficient on which no short training depends more is another device's or framework's: the
least slope of a step time's logarithm over the coefficient's."""


def prior(kind: str, dtype: Dtype) -> Evidence:
    """What is known before anything is measured."""
    return cpu_prior(dtype) if kind == "cpu" else shipped()


def weighed(about: About, rates: Sequence[Rates], steps: Sequence[TimedTraining]) -> Calibration:
    """The calibration: the prior of such devices, moved by probes and steps together."""
    before = prior(about.kind, about.dtype)
    facts = about.model_dump()
    bare = Calibration(
        **facts,
        placements=tuple(placed.placement for placed in rates),
        probes=0,
        steps=(),
        undetermined=(),
        alike=(),
        evidence=before,
    )
    cases = [case_here(timed.short.spec, bare) for timed in steps]
    probes = [_probes(placed, cases) for placed in rates]
    count = sum(placed.size for placed in probes)
    x, measured = cases_of(cases), np.array([timed.seconds for timed in steps])
    noise = np.array([np.hypot(NOISE, timed.spread / np.sqrt(timed.n)) for timed in steps])
    title = (
        f"{len(steps)} short trainings and {count} probes of {about.device}, {about.dtype}, "
        f"{about.date[:10]}"
    )
    after = refit(before, x, measured, title, noise, errors(probes))
    predicted = predict(x, after.fit().centre)
    matters = np.abs(slopes(x, before.fit().centre)).max(axis=0) > LEAST_SLOPE
    counted = [name for name, yes in zip(NAMES, matters.tolist(), strict=True) if yes]
    return bare.model_copy(
        update={
            "probes": count,
            "steps": tuple(
                _calibrated_step(*row) for row in zip(steps, predicted.tolist(), strict=True)
            ),
            "undetermined": tuple(name for name in unmoved(before, after) if name in counted),
            "alike": tuple(alike(before, after)),
            "evidence": after,
        }
    )


def machine_here(calibration: Calibration, ranks: int) -> Machine:
    """This machine for so many ranks."""
    if calibration.kind == "cpu":
        return cpu_machine(calibration, ranks)
    return machine(calibration.catalog_device, devices_per_node=max(1, ranks))


def case_here(spec: RunSpec, calibration: Calibration) -> Case:
    """A run on this machine as the time model sees it."""
    return case_of(spec, machine_here(calibration, spec.world_size), software_of(spec))


def _probes(rates: Rates, cases: Sequence[Case]) -> Probes:
    """One placement's probes, under the rates that its short trainings have."""
    ranks = rates.placement.ranks
    case = next(case for case in cases if case.devices == ranks)
    plain = replace(
        case, tp=1, pp=1, cp=1, zero_stage=0, full_recompute=False, selective_recompute=False
    )
    latency, overlap = rates.of("latency"), rates.of("overlap")
    return Probes(
        plain,
        products=[
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


def _calibrated_step(timed: TimedTraining, predicted_s: float) -> CalibratedStep:
    spec = timed.short.spec
    return CalibratedStep(
        recipe=timed.short.recipe,
        layers=spec.model.num_layers,
        layout=timed.short.layout_label,
        ranks=spec.world_size,
        threads=spec.cluster.threads_per_device or 1,
        measured_s=timed.seconds,
        n=timed.n,
        spread=timed.spread,
        predicted_s=predicted_s,
    )
