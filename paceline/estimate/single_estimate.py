"""Estimate of step time, throughput, memory and cost of one recipe on one cluster."""

from __future__ import annotations

from math import isfinite
from typing import Literal

from pydantic import Field

from paceline.core.errors import UserError
from paceline.core.flops import FlopsInput, model_flops_per_token
from paceline.core.rates import flops_per_s_per_device, mfu, tokens_per_s
from paceline.core.result import WaterfallLevel
from paceline.core.run import Headline, RunSettings, RunSpec
from paceline.core.training import DEFAULT_FP8_RECIPE, Data, Training
from paceline.core.value import Value
from paceline.estimate.costs import TrainingCost, training_cost
from paceline.estimate.estimates import estimates_of_runs
from paceline.estimate.fit.evidence import Evidence, EvidenceKind
from paceline.estimate.measured_network import NetworkRate
from paceline.estimate.model.coefficients import coefficient_values
from paceline.estimate.model.machine import Machine
from paceline.estimate.model.waterfall import uncomputed_flops_notes, waterfall
from paceline.estimate.request import EstimateRequest
from paceline.files import catalog

Kind = Literal[EvidenceKind, "data sheet", "stated", "assumed", "measured"]


class Provenance(Value):
    """Sources of the inputs of an estimate."""

    title: str
    """Description of the measurements to which the coefficients are fitted."""
    coefficients: Kind
    """Coefficients of the time model."""
    peak: Kind
    """Peak FLOP/s of the device."""
    memory_rate: Kind
    """Memory bandwidth of the device."""
    links: Kind
    """Bandwidth inside a node."""
    network: Kind
    """Bandwidth between nodes."""
    memory: Kind
    """Constants of the framework's memory use."""


def estimate_provenance(
    evidence: Evidence, machine: Machine, links: str | None, network: str | None
) -> Provenance:
    """Return the sources of an estimate; `links` and `network` are the names given by the user."""
    links_are: Kind = "assumed" if machine.assumed_properties.intra else "data sheet"
    network_is: Kind = "assumed" if machine.assumed_properties.inter else "data sheet"
    on_cpu = machine.generation == "cpu"
    if machine.inter_measured:
        network_is, network = "measured", None
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
    """Return "stated" if the name is a link of the right kind, intra-node or inter-node."""
    if not name or kind == "assumed":
        return kind
    try:
        link = catalog.find_link(name).link
    except UserError:
        return "stated"  # A bandwidth instead of a name.
    return "stated" if link is None or link.kind == where else kind


class MemoryBytes(Value):
    """Memory of the most loaded device, in bytes."""

    allocated: float
    """Peak of live tensors."""
    reserved: float
    """Memory that the allocator took from the device."""
    device_used: float
    """Memory in use on the device, including the driver context and collective buffers."""
    parts: dict[str, float]
    """Bytes by category; their sum is `device_used`."""


class MeasuredStep(Value):
    """A measured step time, compared with the estimate."""

    step_time_s: float
    source: str
    """Origin of the measurement."""
    n: int | None = None
    """Number of steps whose median it is; None if stated by the user."""
    spread: float | None = None
    """Robust relative spread of the steps."""
    ratio: float
    """Measured step time divided by the estimated one."""
    in_interval: bool
    """True if the measured step time is within the 80% interval of the estimate."""


class Estimate(Value):
    """An estimate; fractions are 0-1; `low_s` and `high_s` bound the 80% interval."""

    recipe: str
    device: str
    devices: int
    layout: str
    """Parallel axes larger than one."""
    micro_batch: int
    recompute: str
    """Activation recompute: none, selective, full, or a budget with its share."""
    dtype: str
    global_batch: int
    """Samples per step; some recipes scale it with the number of devices."""
    seq_len: int
    software: str
    """Requested software, with an optional release: nemo@26.02; `any` if not specified."""
    implementation: str
    """Kernels of its transformer blocks: fused, torch or softmax."""
    step_time_s: float
    low_s: float
    high_s: float
    unseen_sources: int | None = None
    """Number of sources of published steps that fits without them predicted; None if the
    coefficients are of one machine."""
    unseen_sources_in_interval: int | None = None
    """Number of these sources with most steps in the 80% interval."""
    parts: dict[str, float]
    """Seconds of the step by part."""
    tokens_per_s: float
    samples_per_s: float
    headline: Headline = Field("tokens_per_s", exclude=True)
    """The throughput metric of the recipe (RunSettings.headline)."""
    to_target: bool = Field(False, exclude=True)
    """True if training ends at a quality target instead of a number of tokens."""
    flops_per_s_per_device: float
    """Model FLOP/s per device by the FLOPs convention."""
    mfu: float | None
    """Model FLOPs utilization; None without a data-sheet peak."""
    convention: str
    """FLOPs convention of the recipe."""
    mfu_causal: float | None = None
    """MFU in the convention `causal`; None for a model without it, or without a peak."""
    mfu_full_attention: float | None = None
    """MFU in the convention `full-attention`."""
    gemm_efficiency: float
    """Share of the dense peak that large GEMMs reach on this device."""
    memory_bytes: MemoryBytes
    p_oom: float | None
    """Probability of running out of memory; None if the device's memory size is unknown."""
    memory_limit_bytes: float | None = None
    """Memory of the device, or a smaller limit of the recipe; None if it is unknown."""
    currency: str = Field("", exclude=True)
    """Sign of the currency of the costs."""
    training_cost: TrainingCost | None
    waterfall: tuple[WaterfallLevel, ...]
    """MFU waterfall from the dense peak to the estimated and, if known, the measured rate."""
    measured: MeasuredStep | None = None
    measured_network: NetworkRate | None = None
    """The network between nodes, if a run or a file measured it (--inter)."""
    provenance: Provenance
    notes: tuple[str, ...]


def estimate(request: EstimateRequest, evidence: Evidence) -> Estimate:
    """Estimate one recipe; raises UserError if it cannot run or the device is unknown."""
    result = estimate_on(request.machine, request.spec, request, evidence)
    notes = (*result.notes, *request.resolved_recipe.notes)
    return result.model_copy(update={"notes": notes})


def estimate_on(
    machine: Machine, spec: RunSpec, request: EstimateRequest, evidence: Evidence
) -> Estimate:
    """Estimate a resolved run; only software, links, tokens and costs of `request` are used."""
    estimates = estimates_of_runs([spec], [machine], evidence, request.resolved_software)
    memory, time, training = estimates.memory, estimates.time, spec.training
    seconds = float(estimates.step_time_s[0])
    low, high = estimates.interval_s
    sources_inside = evidence.unseen_sources_in_interval
    coefficients = coefficient_values(evidence.fit().centre)
    rate = tokens_per_s(training.seq_len, training.global_batch, seconds)
    flops_input = FlopsInput(spec.model, training.seq_len, lora=spec.lora)

    def rate_in(convention: str) -> float:
        per_sample = training.seq_len * model_flops_per_token(convention, flops_input)
        return flops_per_s_per_device(per_sample, training.global_batch, seconds, spec.world_size)

    flops_rate = rate_in(spec.flops_convention)
    tokens = request.tokens or training.training_tokens
    levels = waterfall(estimates.x, coefficients, time, flops_rate * seconds)
    # A CPU's measured peak is not a data-sheet peak, so there is no MFU.
    peak = None if machine.generation == "cpu" else machine.device.peak_flops_per_s(training.dtype)
    has_all_conventions = not spec.model.conventions
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
        software="native" if request.native else request.software_name,
        implementation=request.resolved_software.implementation_on(machine),
        step_time_s=seconds,
        low_s=float(low[0]),
        high_s=float(high[0]),
        unseen_sources=None if sources_inside is None else evidence.sources,
        unseen_sources_in_interval=sources_inside,
        parts=time.at(0),
        tokens_per_s=rate,
        samples_per_s=training.global_batch / seconds,
        headline=RunSettings.of(spec).headline,
        to_target=training.to_target,
        flops_per_s_per_device=flops_rate,
        mfu=mfu(flops_rate, peak),
        convention=spec.flops_convention,
        mfu_causal=mfu(rate_in("causal"), peak) if has_all_conventions else None,
        mfu_full_attention=mfu(rate_in("full-attention"), peak) if has_all_conventions else None,
        gemm_efficiency=coefficients.get(f"gemm_{machine.generation}", float("nan")),
        memory_bytes=MemoryBytes(
            allocated=float(memory.allocated[0]),
            reserved=float(memory.reserved[0]),
            device_used=float(memory.device_used[0]),
            parts=memory.at(0),
        ),
        p_oom=float(estimates.p_oom[0]) if isfinite(estimates.limit_bytes[0]) else None,
        memory_limit_bytes=float(estimates.limit_bytes[0])
        if isfinite(estimates.limit_bytes[0])
        else None,
        currency=request.prices.currency,
        training_cost=training_cost(
            tokens,
            rate,
            spec.world_size,
            machine.device.power_w,
            request.prices,
            request.failures,
        )
        if tokens
        else None,
        waterfall=levels,
        measured_network=request.network,
        provenance=estimate_provenance(evidence, machine, *_links(request)),
        notes=(
            *machine.notes,
            *_recipe_notes(training),
            *_data_notes(spec.data),
            *uncomputed_flops_notes(levels, spec.flops_convention),
        ),
    )


def _recipe_notes(training: Training) -> tuple[str, ...]:
    """Return a note if the scaling granularity of fp8 GEMMs has no measurements of its own."""
    if training.dtype != "fp8" or training.fp8_recipe == DEFAULT_FP8_RECIPE:
        return ()
    wide = (
        " (including weight gradients, which this recipe computes in bf16)"
        if training.fp8_recipe == "rowwise_with_gw_hp"
        else ""
    )
    return (
        f"fp8_recipe {training.fp8_recipe} is timed as {DEFAULT_FP8_RECIPE}{wide} because no "
        "measurements exist; the estimate is probably too fast",
    )


def _data_notes(data: Data) -> tuple[str, ...]:
    """Return a note if the time depends on document lengths, which are unknown before a run."""
    if not data.document_mask:
        return ()
    return (
        "data.document_mask: time, FLOPs and MFU assume full attention windows because document "
        "lengths are unknown before a run; the metric attended_share shows the real share",
    )


def _links(request: EstimateRequest) -> tuple[str | None, str | None]:
    """Return the user's names of the intra-node link and of the network."""
    if request.site is None:
        return request.intra_link, request.inter_link
    links = [level.link for level in request.site.fabric[:2]]
    inside, network = (*links, None, None)[:2]
    return inside or request.site.intra_link, network or request.site.inter_link
