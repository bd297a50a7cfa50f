"""The training that `paceline estimate` estimates: its layout, its GPUs and its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from paceline.cli import model_options as model
from paceline.cli.layout_options import without_other_axes
from paceline.core.errors import UserError
from paceline.core.layout import AXIS_FIELDS
from paceline.core.layout_checks import layout_problems
from paceline.core.units import compact, count, day_count, gib, step_seconds
from paceline.estimate.calibrate.lookup import FileEvidence, is_cpu
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.memory.device_memory import verdict
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import Estimate, estimate
from paceline.files.recipe import assumed_fields, full_key
from paceline.layouts.planning import (
    PlannedTraining,
    devices_for_days,
    fastest_fitting,
    fewest_devices,
)


@dataclass(frozen=True)
class TrainingAnswer:
    """A request whose layout and devices are decided, and the sentences about these decisions."""

    request: EstimateRequest
    evidence: Evidence
    sentences: tuple[str, ...] = ()
    is_chosen: bool = False
    """True if the layout is already the fastest that fits."""

    def estimate(self) -> Estimate:
        """Return the estimate of the request."""
        return estimate(self.request, self.evidence)

    def answers(self, result: Estimate) -> dict[str, Any]:
        """Return the sentences, and the nearest training that fits if `result` does not."""
        if self.is_chosen or result.p_oom is None or verdict(result.p_oom) == "fits":
            return {"advice": self.sentences}
        sentence, alternative = _nearest(self.request, self.evidence)
        return {
            "advice": (*self.sentences, sentence),
            "alternative": alternative.estimate if alternative else None,
        }


def plan_training(request: EstimateRequest, file_evidence: FileEvidence | None) -> TrainingAnswer:
    """Return the training of a request, in a layout that can run on its devices.

    Without a layout in the recipe and the options, or with one that cannot run, it is the fastest
    that fits. With some axes in the options, the others become 1 if they do not divide the devices.
    """
    evidence = model.chosen_evidence(file_evidence, request)
    recipe, devices = request.resolved_recipe, request.devices
    names = {full_key(change.partition("=")[0].strip()) for change in request.overrides}
    layout_fields = {name for name in names if name.partition(".")[0] == "layout"}
    overrides, note = without_other_axes(recipe.layout, request.overrides, devices)
    if note:
        return TrainingAnswer(replace(request, overrides=overrides), evidence, (f"{note}.",))
    is_open = "layout" in assumed_fields(request.recipe, request.variant, request.overrides)
    axes = {f"layout.{axis}" for axis in AXIS_FIELDS} | {"layout"}
    problems = (
        []
        if is_open or layout_fields & axes
        else layout_problems(request.spec_of_any_layout.parallel)
    )
    if is_cpu(request.device) or not (is_open or problems):
        return TrainingAnswer(request, evidence)
    best = fastest_fitting(request, evidence)
    if best is None:
        return TrainingAnswer(request, evidence)
    why = f" The layout of {recipe.name} cannot run here: {problems[0]}." if problems else ""
    sentence = (
        "Layout: the fastest that fits by estimate (`paceline tune --estimate-only` ranks them)."
    )
    return TrainingAnswer(best.request, evidence, (sentence + why,), is_chosen=True)


def plan_for_days(
    request: EstimateRequest, file_evidence: FileEvidence | None, days: float
) -> TrainingAnswer:
    """Return the training on the fewest devices that finish in `days`."""
    evidence = model.chosen_evidence(file_evidence, request)
    length = request.tokens or request.resolved_recipe.training.training_tokens
    if not length:
        raise UserError("--days", "needs the number of tokens", remedy="add --tokens, e.g. 15T")
    best, trainings = devices_for_days(request, evidence, days)
    if best is None:
        fastest = min(trainings, key=_days_of, default=None)
        fastest_time = (
            f"; {fastest.estimate.devices:,} take {day_count(_days_of(fastest))} days"
            if fastest
            else ""
        )
        raise UserError(
            f"--days {days:g}",
            f"no number of {request.device} that was tried is enough{fastest_time}",
            remedy="a larger --gbs uses more GPUs",
        )
    cost, result = best.estimate.training_cost, best.estimate
    assert cost is not None, "devices_for_days() takes only trainings with a length"
    low, high = (cost.days * s / result.step_time_s for s in (result.low_s, result.high_s))
    per_node = best.request.cluster.devices_per_node
    num_devices = ceil(result.devices * cost.days / days / per_node) * per_node
    sentences = [
        f"{result.devices:,} x {result.device} train {count(length)} tokens in "
        f"{day_count(cost.days)} days ({day_count(low)} to {day_count(high)}, 80%); "
        f"{compact(days)} days need about {num_devices:,}."
    ]
    fewer = [each for each in trainings if each.estimate.devices < result.devices]
    if fewer:
        nearest = max(fewer, key=lambda each: each.estimate.devices)
        devices = nearest.estimate.devices
        sentences.append(f"{devices:,} take {day_count(_days_of(nearest))} days.")
    sentences.append("Estimated at 1, 2, 3, 4, 6, 8 ... nodes.")
    return TrainingAnswer(best.request, evidence, (" ".join(sentences),), is_chosen=True)


def plan_for_budget(training: TrainingAnswer, budget: tuple[float, str]) -> TrainingAnswer:
    """Return the training with as many tokens as a budget pays for."""
    amount, sign = budget
    request = training.request
    if not request.prices.per_device_hour:
        raise UserError("--budget", "needs a price", remedy="add --price, e.g. $2.5 per GPU-hour")
    if request.tokens:
        raise UserError("--budget", "cannot be combined with --tokens", remedy="leave one out")
    cost = replace(training, request=replace(request, tokens=1e12)).estimate().training_cost
    assert cost is not None and cost.cost_per_million_tokens, "it has a price and a length"
    tokens = 1e6 * amount / cost.cost_per_million_tokens
    days = cost.days * tokens / 1e12
    sentence = (
        f"{sign}{amount:,.0f} pays for {count(tokens)} tokens in {day_count(days)} days on "
        f"{request.devices:,} GPUs."
    )
    return replace(
        training,
        request=replace(request, tokens=tokens),
        sentences=(sentence, *training.sentences),
    )


def _nearest(request: EstimateRequest, evidence: Evidence) -> tuple[str, PlannedTraining | None]:
    """Return a sentence on the nearest training that fits, and that training."""
    if is_cpu(request.device):
        return "Use a smaller model, batch or sequence.", None
    same_size = fastest_fitting(request, evidence)
    if same_size is not None:
        return f"Fits on the same GPUs with {_words(same_size)}", same_size
    larger = fewest_devices(request, evidence)
    devices = f"{request.devices:,} x {request.cluster.device}"
    if larger is None:
        return f"No layout fits on {devices}, nor on 64 times as many.", None
    where = f"{larger.estimate.devices:,} GPUs are enough with"
    return f"No layout fits on {devices}; {where} {_words(larger)}", larger


def _words(training: PlannedTraining) -> str:
    """Return the layout option, memory and speed of a training."""
    result = training.estimate
    rate = result.tokens_per_s / result.devices
    return (
        f"--layout {training.changes}: {gib(result.memory_bytes.device_used)}, "
        f"{rate:,.0f} tokens/s/GPU, {step_seconds(result.step_time_s)} s per step."
    )


def _days_of(training: PlannedTraining) -> float:
    cost = training.estimate.training_cost
    return cost.days if cost else float("inf")
