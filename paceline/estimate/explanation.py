"""Measured steps beside the estimate of the same training: what the time model explains of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.core.run_report import RunReport
from paceline.core.units import counted, percent, step_seconds
from paceline.estimate.answer import Estimate, MeasuredStep, estimate_on
from paceline.estimate.calibrate.lookup import evidence_for, machine_for
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.model.waterfall import to_measured
from paceline.estimate.question import Question, check_link
from paceline.estimate.run_case import software_of
from paceline.files import catalog
from paceline.files.recipe import load_recipe, parse_override


@dataclass(frozen=True)
class MeasuredRun:
    """A run with a step time."""

    name: str
    spec: RunSpec
    step_time_s: float
    n: int | None
    spread: float | None
    global_batch: int
    """Of the steps that were timed; another than the spec's while a batch ramps up."""

    @property
    def timed(self) -> RunSpec:
        """The spec with the batch of the steps that were timed."""
        training = self.spec.training.model_copy(update={"global_batch": self.global_batch})
        return self.spec.model_copy(update={"training": training})


@dataclass(frozen=True)
class RunClaims:
    """What somebody says of a run, None where nothing; all of it must be so."""

    recipe: str | None = None
    device: str | None = None
    devices: int | None = None
    per_node: int | None = None
    variant: str | None = None
    overrides: tuple[str, ...] = ()
    intra: str | None = None
    inter: str | None = None
    stack: str | None = None
    compiled: bool = False


def measured_run(report: RunReport) -> MeasuredRun:
    """The run of a report; raises UserError for one without a step time and for an imported log."""
    result, spec = report.result, report.spec
    if spec is None:
        raise UserError(
            f"run {result.run}",
            "is an imported log, whose settings are not all known",
            remedy="--measured-step-time takes its step time",
        )
    step, window = result.metrics.get("step_time_s"), result.window
    if result.status != "ok" or step is None or step.value is None or window is None:
        why = f": {result.reason}" if result.reason else ""
        raise UserError(
            f"run {result.run}", f"has no step time, its status is {result.status}{why}"
        )
    batch = window.global_batch or spec.training.global_batch
    return MeasuredRun(result.run, spec, step.value, step.n, step.spread, batch)


def question_of(run: MeasuredRun, claims: RunClaims | None = None) -> Question:
    """The question that the run answers; links are those claimed where the run has none.

    Raises UserError where a claim differs from the run, and for a link in the place of another
    kind.
    """
    claims = claims or RunClaims()
    wrong = [
        f"{name} is {actual}, not {claimed}" for name, actual, claimed in _differences(run, claims)
    ]
    if wrong:
        raise UserError(
            f"run {run.name}", "; ".join(wrong), remedy="what is left out is as in the run"
        )
    check_link("intra", claims.intra)
    check_link("inter", claims.inter)
    spec, cluster, software = run.spec, run.spec.cluster, software_of(run.spec)
    return Question(
        spec.recipe,
        cluster.device,
        spec.world_size,
        spec.variant,
        devices_per_node=cluster.devices_per_node,
        intra_link=cluster.intra_link or claims.intra,
        inter_link=cluster.inter_link or claims.inter,
        stack=software.stack if software.native else claims.stack or software.known_as,
        compiled=software.compiled or claims.compiled,
        native=software.native,
    )


def _differences(run: MeasuredRun, claims: RunClaims) -> Iterator[tuple[str, Any, Any]]:
    """(field, what the run has, what is claimed instead)."""
    spec, cluster = run.spec, run.spec.cluster
    content, software = spec.model_dump(mode="json"), software_of(spec)
    native, device = software.native, claims.device
    pairs = [
        ("the recipe", spec.recipe, _recipe_name(spec, claims.recipe)),
        ("the device", cluster.device, device and catalog.find_device(device).device.name),
        ("the number of devices", spec.world_size, claims.devices),
        ("the number of devices a node", cluster.devices_per_node, claims.per_node),
        ("the variant", spec.variant, claims.variant),
        (
            "the link inside a node",
            cluster.intra_link,
            claims.intra if cluster.intra_link else None,
        ),
        ("the network", cluster.inter_link, claims.inter if cluster.inter_link else None),
        ("the stack", software.stack, claims.stack if native else None),
        (
            "training.compile",
            spec.training.compile,
            "blocks" if claims.compiled and native else None,
        ),
    ]
    overrides = [parse_override(text) for text in claims.overrides]
    pairs += [(key, _field(content, key), value) for key, value in overrides]
    for name, actual, claimed in pairs:
        if claimed not in (None, actual):
            yield name, actual, claimed


def _recipe_name(spec: RunSpec, recipe: str | None) -> str | None:
    """The name of a recipe claimed by name or file; the run's own is known without its file."""
    return recipe if recipe in (None, spec.recipe) else load_recipe(recipe).name


def _field(content: Any, key: str) -> Any:
    """The value at a dotted field; None where there is no such field."""
    for name in key.split("."):
        if not isinstance(content, dict):
            return None
        content = cast(dict[str, Any], content).get(name)
    return content


def explain(run: MeasuredRun, question: Question, evidence: Evidence | None = None) -> Estimate:
    """The run's estimate, led on to its measured step; `evidence` None is what the device has.

    Raises UserError where nothing can be expected: a processor that is not calibrated, a device
    without a peak.
    """
    spec = run.timed
    links = {"intra_link": question.intra_link, "inter_link": question.inter_link}
    cluster = spec.cluster.model_copy(update=links)
    spec = spec.model_copy(update={"cluster": cluster})
    dtype = spec.training.dtype
    machine = machine_for(cluster, dtype, given=question.calibration)
    evidence = evidence or evidence_for(cluster.device, dtype, cluster.device_label)
    estimate = estimate_on(machine, spec, question, evidence)
    return beside(estimate, run.step_time_s, f"run {run.name}", run.n, run.spread)


def beside(
    estimate: Estimate,
    seconds: float,
    source: str,
    n: int | None = None,
    spread: float | None = None,
) -> Estimate:
    """An estimate with a step that was measured, and the waterfall led on to that."""
    measured = MeasuredStep(
        step_time_s=seconds,
        source=source,
        n=n,
        spread=spread,
        ratio=seconds / estimate.step_time_s,
        in_interval=estimate.low_s <= seconds <= estimate.high_s,
    )
    levels = to_measured(estimate.waterfall, estimate.step_time_s, seconds)
    return estimate.model_copy(update={"measured": measured, "waterfall": levels})


def measured_sentence(estimate: Estimate) -> str:
    """Return the measured step compared with the expected one, and what that rests on."""
    measured = estimate.measured
    if measured is None:
        raise ValueError("nothing was measured")
    low, high = step_seconds(estimate.low_s), step_seconds(estimate.high_s)
    source = measured.source
    source += "" if measured.n is None else f", median of {counted(measured.n, 'step')}"
    source += "" if measured.spread is None else f", spread {percent(measured.spread, 1)}"
    where = "in" if measured.in_interval else "outside"
    return (
        f"Expected {step_seconds(estimate.step_time_s)} s a step (80% interval {low}-{high} s); "
        f"the measured {step_seconds(measured.step_time_s)} s ({source}) are "
        f"{measured.ratio:.3f} times that, {where} the interval. "
        f"The estimate rests on: {estimate.evidence.title}."
    )


def explained(report: RunReport) -> RunReport:
    """The report with the way from the peak to its step, or with why there is none.

    Only runs that have a step time are looked at; others, and imported logs, stay as they are.
    """
    if report.spec is None or report.result.status != "ok":
        return report
    try:
        run = measured_run(report)
        estimate = explain(run, question_of(run))
    except UserError as error:
        remedy = f"; {error.remedy}" if error.remedy else ""
        why = f"No expected step time: {error.where} {error.what}{remedy}."
        return replace(report, expected=why)
    return replace(report, waterfall=estimate.waterfall, expected=measured_sentence(estimate))
