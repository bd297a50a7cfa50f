"""Step time, throughput and cost of a recipe on a cluster that nobody has run it on."""

from __future__ import annotations

from math import isfinite
from typing import Literal

from pydantic import Field

from paceline.core.errors import UserError
from paceline.core.flops import FlopsInput, model_flops_per_token
from paceline.core.rates import flops_per_s_per_device, mfu, tokens_per_s
from paceline.core.run import Headline, RunSettings, RunSpec
from paceline.core.training import DEFAULT_FP8_RECIPE, Data, Training
from paceline.core.value import Value
from paceline.core.waterfall import WaterfallLevel
from paceline.estimate.costs import TrainingCost, training_cost
from paceline.estimate.estimates import estimates_of_runs
from paceline.estimate.fit.evidence import Evidence, EvidenceKind
from paceline.estimate.model.coefficients import named
from paceline.estimate.model.machine import Machine
from paceline.estimate.model.waterfall import rise_notes, waterfall
from paceline.estimate.question import Question
from paceline.files import catalog

Kind = Literal[EvidenceKind, "data sheet", "stated", "assumed"]


class Provenance(Value):
    """Where an estimate's inputs are from."""

    title: str
    """Of the coefficients."""
    coefficients: Kind
    peak: Kind
    memory_rate: Kind
    links: Kind
    """Inside a node."""
    network: Kind
    memory: Kind
    """What a framework keeps in memory."""


def provenance_of(
    evidence: Evidence, machine: Machine, links: str | None, network: str | None
) -> Provenance:
    """The basis of one estimate; `links` and `network` are the names that were given."""
    links_are: Kind = "assumed" if machine.assumed.intra else "data sheet"
    network_is: Kind = "assumed" if machine.assumed.inter else "data sheet"
    on_cpu = machine.generation == "cpu"
    rates: Kind = evidence.provenance if on_cpu else "data sheet"
    return Provenance(
        title=evidence.title,
        coefficients=evidence.provenance,
        peak=rates,
        memory_rate=rates,
        links=evidence.provenance if on_cpu else _link(links_are, links, "intra"),
        network=evidence.provenance if on_cpu else _link(network_is, network, "inter"),
        memory="public prior",
    )


def _link(kind: Kind, name: str | None, where: Literal["intra", "inter"]) -> Kind:
    """A name counts where it says what link is there: no network inside a node, nor the reverse."""
    if not name or kind == "assumed":
        return kind
    try:
        link = catalog.find_link(name).link
    except UserError:
        return "stated"  # a rate, since the machine is known
    return "stated" if link is None or link.kind == where else kind


class MemoryBytes(Value):
    """Memory of the most loaded device, in bytes."""

    allocated: float
    reserved: float
    device_used: float
    parts: dict[str, float]
    """They add up to `device_used`."""


class MeasuredStep(Value):
    """A step time that was measured, beside the estimated one."""

    step_time_s: float
    source: str
    """The run that it is of, or that it was stated."""
    n: int | None = None
    """Steps whose median it is; None for a stated one."""
    spread: float | None = None
    """Robust relative spread of these."""
    ratio: float
    """Measured over estimated."""
    in_interval: bool
    """Whether it lies in the estimate's 80 % interval."""


class Estimate(Value):
    """The answer; fractions are 0-1, `low` and `high` hold 80 %."""

    recipe: str
    device: str
    devices: int
    layout: str
    """Its axes that are larger than one."""
    micro_batch: int
    recompute: str
    """none, selective, full, or budget and its share."""
    dtype: str
    global_batch: int
    """Of a step; a recipe's may grow with its devices."""
    seq_len: int
    software: str
    """As it was asked for: a name of published steps, of a release or not, or `any`."""
    stack: str
    """How it computes there."""
    step_time_s: float
    low_s: float
    high_s: float
    parts: dict[str, float]
    """Seconds of the step, by part."""
    tokens_per_s: float
    samples_per_s: float
    headline: Headline = Field("tokens_per_s", exclude=True)
    """Which of the two states the speed, as of a run (RunSettings.headline)."""
    to_target: bool = Field(False, exclude=True)
    """Whether a quality ends the training, so that no number of tokens is its length."""
    flops_per_s_per_device: float
    mfu: float | None
    convention: str
    reachable: float
    """Share of the dense peak that large products reach here, by the coefficients."""
    memory_bytes: MemoryBytes
    p_oom: float | None
    """Probability that the device runs out of memory; None where its size is unknown."""
    training_cost: TrainingCost | None
    waterfall: tuple[WaterfallLevel, ...]
    """From the peak to `flops_per_s_per_device`, and on to what was measured."""
    measured: MeasuredStep | None = None
    evidence: Provenance
    notes: tuple[str, ...]


def estimate(question: Question, evidence: Evidence) -> Estimate:
    """The estimate of one recipe; raises UserError for what cannot run or is in no catalog."""
    spec = question.spec
    return estimate_on(question.machine, spec, question, evidence)


def estimate_on(
    machine: Machine, spec: RunSpec, question: Question, evidence: Evidence
) -> Estimate:
    """The estimate of a resolved run; of `question` count stack, links, tokens, and costs alone."""
    estimates = estimates_of_runs([spec], [machine], evidence, question.software)
    needed, time, training = estimates.memory, estimates.time, spec.training
    seconds = float(estimates.step_time_s[0])
    low, high = estimates.interval_s
    coefficients = named(evidence.fit().centre)
    rate = tokens_per_s(training.seq_len, training.global_batch, seconds)
    flops_input = FlopsInput(spec.model, training.seq_len, lora=spec.lora)
    per_sample = training.seq_len * model_flops_per_token(spec.flops_convention, flops_input)
    reached = flops_per_s_per_device(per_sample, training.global_batch, seconds, spec.world_size)
    tokens = question.tokens or training.whole_tokens
    levels = waterfall(estimates.x, coefficients, time, reached * seconds)
    # A measured peak is no data sheet's.
    peak = None if machine.generation == "cpu" else machine.device.peak_flops_per_s(training.dtype)
    return Estimate(
        recipe=spec.recipe,
        device=machine.device.name,
        devices=spec.world_size,
        layout=spec.layout.label(spec.world_size),
        micro_batch=spec.layout.micro_batch,
        recompute=spec.layout.recomputation,
        dtype=training.dtype,
        global_batch=training.global_batch,
        seq_len=training.seq_len,
        software="native" if question.native else question.stack,
        stack=question.software.stack_on(machine),
        step_time_s=seconds,
        low_s=float(low[0]),
        high_s=float(high[0]),
        parts=time.at(0),
        tokens_per_s=rate,
        samples_per_s=training.global_batch / seconds,
        headline=RunSettings.of(spec).headline,
        to_target=training.to_target,
        flops_per_s_per_device=reached,
        mfu=mfu(reached, peak),
        convention=spec.flops_convention,
        reachable=coefficients.get(f"gemm_{machine.generation}", float("nan")),
        memory_bytes=MemoryBytes(
            allocated=float(needed.allocated[0]),
            reserved=float(needed.reserved[0]),
            device_used=float(needed.device_used[0]),
            parts=needed.at(0),
        ),
        p_oom=float(estimates.p_oom[0]) if isfinite(estimates.limit_bytes[0]) else None,
        training_cost=training_cost(
            tokens,
            rate,
            spec.world_size,
            machine.device.power_w,
            question.prices,
            question.failures,
        )
        if tokens
        else None,
        waterfall=levels,
        evidence=provenance_of(evidence, machine, *_links(question)),
        notes=(
            *machine.notes,
            *_recipe_notes(training),
            *_data_notes(spec.data),
            *rise_notes(levels, spec.flops_convention),
        ),
    )


def _recipe_notes(training: Training) -> tuple[str, ...]:
    """What the time model does not know of how fp8's products are scaled."""
    if training.dtype != "fp8" or training.fp8_recipe == DEFAULT_FP8_RECIPE:
        return ()
    wide = (
        ", and the weights' gradients, which it computes in bf16, as if they were in fp8"
        if training.fp8_recipe == "rowwise_with_gw_hp"
        else ""
    )
    return (
        f"fp8_recipe {training.fp8_recipe} is timed as {DEFAULT_FP8_RECIPE}, for want of "
        f"measurements{wide}: likely too fast",
    )


def _data_notes(data: Data) -> tuple[str, ...]:
    """What is not known of the data before a run."""
    if not data.document_mask:
        return ()
    return (
        "data.document_mask: time, FLOPs and MFU are of whole windows, because nothing is known of "
        "the documents' lengths before a run: its attention does less, by metric attended_share",
    )


def _links(question: Question) -> tuple[str | None, str | None]:
    """The names that were given of links inside a node and of the network."""
    if question.site is None:
        return question.intra_link, question.inter_link
    named = [level.link for level in question.site.fabric[:2]]
    inside, network = (*named, None, None)[:2]
    return inside or question.site.intra_link, network or question.site.inter_link
