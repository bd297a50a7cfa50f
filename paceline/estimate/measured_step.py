"""Comparison of a measured step time with the estimate of the same run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.core.run_report import RunReport
from paceline.core.units import percent, pluralize, step_seconds
from paceline.estimate.calibrate.lookup import evidence_for, machine_for
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.measured_network import with_measured_network
from paceline.estimate.model.waterfall import extend_to_measured
from paceline.estimate.request import EstimateRequest, check_link
from paceline.estimate.run_case import software_of
from paceline.estimate.single_estimate import Estimate, MeasuredStep, estimate_on
from paceline.files import catalog
from paceline.files.recipe import load_recipe, parse_override


@dataclass(frozen=True)
class MeasuredRun:
    """A run with a measured step time."""

    name: str
    spec: RunSpec
    step_time_s: float
    n: int | None
    spread: float | None
    global_batch: int
    """Batch of the measured steps; differs from the spec's during a batch ramp-up."""

    @property
    def measured_spec(self) -> RunSpec:
        """The spec with the batch of the measured steps."""
        training = self.spec.training.model_copy(update={"global_batch": self.global_batch})
        return self.spec.model_copy(update={"training": training})


@dataclass(frozen=True)
class RequestedSettings:
    """Settings given together with a run, which must match it; None if not given."""

    recipe: str | None = None
    device: str | None = None
    devices: int | None = None
    per_node: int | None = None
    variant: str | None = None
    overrides: tuple[str, ...] = ()
    intra: str | None = None
    inter: str | None = None
    software: str | None = None
    compiled: bool = False


def measured_run(report: RunReport) -> MeasuredRun:
    """Return the run of a report; raises UserError without a step time and for imported logs."""
    result, spec = report.result, report.spec
    if spec is None:
        raise UserError(
            f"run {result.run}",
            "is an imported log with unknown settings",
            remedy="give its step time with --measured-step-time",
        )
    step, window = result.metrics.get("step_time_s"), result.window
    if result.status != "ok" or step is None or step.value is None or window is None:
        why = f": {result.reason}" if result.reason else ""
        raise UserError(
            f"run {result.run}", f"has no step time; its status is {result.status}{why}"
        )
    batch = window.global_batch or spec.training.global_batch
    return MeasuredRun(result.run, spec, step.value, step.n, step.spread, batch)


def request_for_run(
    run: MeasuredRun, requested_settings: RequestedSettings | None = None
) -> EstimateRequest:
    """Return the estimate request that matches the run; requested links fill in missing ones.

    Raises UserError if a requested setting differs from the run or a link is of the wrong kind.
    """
    requested_settings = requested_settings or RequestedSettings()
    wrong = [
        f"{name} is {actual}, not {expected}"
        for name, actual, expected in _differences(run, requested_settings)
    ]
    if wrong:
        raise UserError(
            f"run {run.name}", "; ".join(wrong), remedy="omit options to use the run's settings"
        )
    check_link("intra", requested_settings.intra)
    check_link("inter", requested_settings.inter)
    spec, cluster, software = run.spec, run.spec.cluster, software_of(run.spec)
    return EstimateRequest(
        recipe=spec.recipe,
        device=cluster.device,
        devices=spec.world_size,
        variant=spec.variant,
        devices_per_node=cluster.devices_per_node,
        intra_link=cluster.intra_link or requested_settings.intra,
        inter_link=cluster.inter_link or requested_settings.inter,
        software=software.implementation
        if software.native
        else requested_settings.software or software.known_as,
        compiled=software.compiled or requested_settings.compiled,
        native=software.native,
    )


def _differences(run: MeasuredRun, settings: RequestedSettings) -> Iterator[tuple[str, Any, Any]]:
    """Yield each differing setting with the run's value and the requested one."""
    spec, cluster = run.spec, run.spec.cluster
    content, software = spec.model_dump(mode="json"), software_of(spec)
    native, device = software.native, settings.device
    pairs = [
        ("the recipe", spec.recipe, _recipe_name(spec, settings.recipe)),
        ("the device", cluster.device, device and catalog.find_device(device).device.name),
        ("the number of devices", spec.world_size, settings.devices),
        ("the number of devices per node", cluster.devices_per_node, settings.per_node),
        ("the variant", spec.variant, settings.variant),
        (
            "the link inside a node",
            cluster.intra_link,
            settings.intra if cluster.intra_link else None,
        ),
        ("the network", cluster.inter_link, settings.inter if cluster.inter_link else None),
        ("the software", software.implementation, settings.software if native else None),
        (
            "training.compile",
            spec.training.compile,
            "blocks" if settings.compiled and native else None,
        ),
    ]
    overrides = [parse_override(text) for text in settings.overrides]
    pairs += [(key, _field(content, key), value) for key, value in overrides]
    for name, actual, expected in pairs:
        if expected not in (None, actual):
            yield name, actual, expected


def _recipe_name(spec: RunSpec, recipe: str | None) -> str | None:
    """Return the name of a recipe given by name or file; the run's own needs no file."""
    return recipe if recipe in (None, spec.recipe) else load_recipe(recipe).name


def _field(content: Any, key: str) -> Any:
    """Return the value of a dotted field; None if there is no such field."""
    for name in key.split("."):
        if not isinstance(content, dict):
            return None
        content = cast(dict[str, Any], content).get(name)
    return content


def estimate_measured_run(
    run: MeasuredRun, request: EstimateRequest, evidence: Evidence | None = None
) -> Estimate:
    """Estimate a run and compare the estimate with its measured step.

    The default `evidence` is that of the device. Raises UserError if the device cannot be
    estimated: an uncalibrated CPU, or a device without a peak.
    """
    spec = run.measured_spec
    links = {"intra_link": request.intra_link, "inter_link": request.inter_link}
    cluster = spec.cluster.model_copy(update=links)
    spec = spec.model_copy(update={"cluster": cluster})
    dtype = spec.training.dtype
    machine = machine_for(cluster, dtype, cpu_calibration=request.calibration)
    if request.network:
        machine = with_measured_network(machine, request.network, cluster.nodes)
    evidence = evidence or evidence_for(cluster.device, dtype, cluster.device_label)
    estimate = estimate_on(machine, spec, request, evidence)
    return with_measurement(estimate, run.step_time_s, f"run {run.name}", run.n, run.spread)


def with_measurement(
    estimate: Estimate,
    seconds: float,
    source: str,
    n: int | None = None,
    spread: float | None = None,
) -> Estimate:
    """Return the estimate with a measured step time and the waterfall extended to it."""
    measured = MeasuredStep(
        step_time_s=seconds,
        source=source,
        n=n,
        spread=spread,
        ratio=seconds / estimate.step_time_s,
        in_interval=estimate.low_s <= seconds <= estimate.high_s,
    )
    levels = extend_to_measured(estimate.waterfall, estimate.step_time_s, seconds)
    return estimate.model_copy(update={"measured": measured, "waterfall": levels})


def measured_sentence(estimate: Estimate) -> str:
    """Return a sentence that compares the measured step with the expected one."""
    measured = estimate.measured
    if measured is None:
        raise ValueError("the estimate has no measured step")
    low, high = step_seconds(estimate.low_s), step_seconds(estimate.high_s)
    source = measured.source
    source += "" if measured.n is None else f", median of {pluralize(measured.n, 'step')}"
    source += "" if measured.spread is None else f", spread {percent(measured.spread, 1)}"
    where = "inside" if measured.in_interval else "outside"
    return (
        f"Measured {step_seconds(measured.step_time_s)} s per step ({source}), "
        f"{measured.ratio:.3f} times the estimate of {step_seconds(estimate.step_time_s)} s and "
        f"{where} its 80% interval ({low}-{high} s). "
        f"The estimate is based on {estimate.provenance.title}."
    )


def with_expected_step_time(report: RunReport) -> RunReport:
    """Return the report with its MFU waterfall, or with the reason why there is none.

    Runs without a step time and imported logs are returned unchanged.
    """
    if report.spec is None or report.result.status != "ok":
        return report
    try:
        run = measured_run(report)
        estimate = estimate_measured_run(run, request_for_run(run))
    except UserError as error:
        remedy = f"; {error.remedy}" if error.remedy else ""
        why = f"No expected step time: {error.where} {error.what}{remedy}."
        return replace(report, expected=why)
    return replace(report, waterfall=estimate.waterfall, expected=measured_sentence(estimate))
