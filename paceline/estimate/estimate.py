"""Step time, throughput and cost of a recipe on a cluster that nobody has run it on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil

from paceline.core.errors import UserError
from paceline.core.flops import FlopsInput, model_flops_per_token
from paceline.core.hardware import Cluster
from paceline.core.layout import Layout
from paceline.core.rates import flops_per_s_per_device, mfu, tokens_per_s
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape, Shape
from paceline.core.value import Value
from paceline.core.waterfall import WaterfallLevel
from paceline.estimate.calibrate.lookup import automatic_dtype, is_cpu, processor
from paceline.estimate.costs import Bill, Failures, Prices, bill
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.interval import bounds, log_sd
from paceline.estimate.memory.case import with_memory
from paceline.estimate.memory.device_memory import memory, p_oom
from paceline.estimate.memory.framework import frameworks_of
from paceline.estimate.model.case import Case, Cases, Stack, cases_of
from paceline.estimate.model.coefficients import named
from paceline.estimate.model.machine import Machine, machine
from paceline.estimate.model.pipeline import followed_step
from paceline.estimate.model.waterfall import waterfall
from paceline.estimate.provenance import Basis, basis_of
from paceline.files import catalog
from paceline.files.recipe import Recipe, load_recipe, resolve


@dataclass(frozen=True)
class Question:
    """What is to be estimated."""

    recipe: str
    device: str
    devices: int
    variant: str | None = None
    overrides: tuple[str, ...] = ()
    devices_per_node: int = 8
    intra_link: str | None = None
    inter_link: str | None = None
    stack: Stack = "fused"
    compiled: bool = False
    tokens: float | None = None
    """Length of the whole training; None takes the recipe's."""
    prices: Prices = field(default_factory=Prices)
    failures: Failures | None = None
    native: bool = False
    """Memory by the constants of the trainer that comes with Paceline, as on CPUs always."""


class MemoryBytes(Value):
    """Memory of the most loaded device, in bytes."""

    allocated: float
    reserved: float
    device_used: float
    parts: dict[str, float]
    """They add up to `device_used`."""


class Measured(Value):
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
    dtype: str
    stack: str
    step_time_s: float
    low_s: float
    high_s: float
    parts: dict[str, float]
    """Seconds of the step, by part."""
    tokens_per_s: float
    samples_per_s: float
    flops_per_s_per_device: float
    mfu: float | None
    convention: str
    reachable: float
    """Share of the dense peak that large products reach here, by the coefficients."""
    memory_bytes: MemoryBytes
    p_oom: float | None
    """Probability that the device runs out of memory; None where its size is unknown."""
    bill: Bill | None
    waterfall: tuple[WaterfallLevel, ...]
    """From the peak to `flops_per_s_per_device`, and on to what was measured."""
    measured: Measured | None = None
    evidence: Basis
    notes: tuple[str, ...]


def estimate(question: Question, evidence: Evidence) -> Estimate:
    """The estimate of one recipe; raises UserError for what cannot run or is in no catalog."""
    spec = spec_of(question)
    return estimate_on(machine_of(question), spec, question, evidence)


def estimate_on(here: Machine, spec: RunSpec, question: Question, evidence: Evidence) -> Estimate:
    """The estimate of a resolved run; of `question` count stack, links, tokens, and costs alone."""
    case = case_of(spec, here, question.stack, question.compiled)
    return _told(question, spec, here, cases_of([case]), evidence)


def spec_of(question: Question) -> RunSpec:
    """The recipe resolved on the devices asked for."""
    return resolve(recipe_of(question), cluster_of(question), True, question.variant)


def recipe_of(question: Question) -> Recipe:
    """The recipe asked for; `auto` is the dtype that it is estimated in on that device."""
    recipe = load_recipe(question.recipe, question.variant, question.overrides)
    if recipe.training.dtype != "auto":
        return recipe
    own = recipe.training.model_copy(update={"dtype": automatic_dtype(question.device)})
    return recipe.model_copy(update={"training": own})


def spec_of_any_layout(question: Question) -> RunSpec:
    """The recipe on the devices asked for, whether or not its own layout and batch fit there."""
    recipe, cluster = recipe_of(question), cluster_of(question)
    batch = recipe.training.batch(cluster.world_size, cluster.nodes)
    single = recipe.training.model_copy(
        update={"ramp_up": None, "global_batch": 1, "batch_per_device": None}
    )
    plain = recipe.model_copy(update={"layout": Layout(), "training": single})
    one = cluster.model_copy(update={"nodes": 1, "devices_per_node": 1})
    spec = resolve(plain, one, True, question.variant)
    training = spec.training.model_copy(update={"global_batch": batch})
    return spec.model_copy(
        update={"cluster": cluster, "layout": recipe.layout, "training": training}
    )


def cluster_of(question: Question) -> Cluster:
    """The devices asked for; raises UserError where they do not fill whole nodes."""
    per_node = min(question.devices_per_node, question.devices)
    if is_cpu(question.device):
        per_node = question.devices
    cluster = Cluster(
        name="estimate",
        device=catalog.find_device(question.device).device.name,
        nodes=ceil(question.devices / per_node),
        devices_per_node=per_node,
        intra_link=question.intra_link,
        inter_link=question.inter_link,
    )
    if cluster.world_size != question.devices:
        raise UserError(f"--gpus {question.devices}", f"is no multiple of {per_node} a node",
                        remedy="--per-node N")  # fmt: skip
    return cluster


def machine_of(question: Question) -> Machine:
    """The device and its links; raises UserError for one that has no peak, of a data sheet or measured."""
    if is_cpu(question.device):
        return processor(recipe_of(question).training.dtype, question.devices)
    return machine(
        question.device, question.intra_link, question.inter_link, question.devices_per_node
    )


def case_of(spec: RunSpec, here: Machine, stack: Stack, compiled: bool = False) -> Case:
    """The resolved run as the time model sees it; raises UserError for bf16 where fp16 alone has a rate."""
    layout, training = spec.layout, spec.training
    if training.dtype == "bf16" and here.device.has_only_fp16:
        raise UserError(here.device.name, "does not compute in bf16",
                        allowed=", ".join(here.device.peaks), remedy="--set training.dtype=fp16")  # fmt: skip
    case = replace(
        _shape(spec.model),
        seq_len=training.seq_len,
        devices=spec.world_size,
        global_batch=training.global_batch,
        frozen=spec.lora is not None,
        tp=layout.tp, pp=layout.pp, cp=layout.cp, vp=layout.vp, ep=layout.ep,
        micro_batch=layout.micro_batch, zero_stage=layout.zero_stage,
        sequence_parallel=layout.sequence_parallel,
        full_recompute=layout.recompute == "full",
        selective_recompute=layout.recompute == "selective",
        stack="torch" if here.generation == "cpu" else stack,
        compiled=compiled, flash=stack != "softmax",
    )  # fmt: skip
    dtype = training.dtype
    case = replace(
        case,
        peak_16bit=here.peak_wide(dtype), peak_narrow=here.peak_narrow(dtype),
        memory_bytes_per_s=_memory_rate(here),
        intra_bytes_per_s=here.intra_bytes_per_s, inter_bytes_per_s=here.inter_bytes_per_s,
        generation=here.generation, domain=here.domain, power=here.power, mesh=here.mesh,
        crowding=here.crowding,
        assumed_intra=here.assumed.intra, assumed_inter=here.assumed.inter,
        assumed_device=here.assumed.device,
        four_bit=dtype == "nvfp4", block_scaled=dtype in ("mxfp8", "nvfp4"),
    )  # fmt: skip
    return with_memory(case, spec)


def _shape(shape: Shape) -> Case:
    """A case with the model's sizes alone; an mmdit counts as blocks of 12 h^2 without a head."""
    decoder = isinstance(shape, DecoderShape)
    return Case(
        layers=shape.num_layers, hidden=shape.hidden_size, ffn=shape.ffn_size,
        heads=shape.num_heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab=shape.padded_vocab() if decoder else 0.0, seq_len=0, gated=decoder and shape.gated_ffn,
        experts=shape.num_experts if decoder else 1,
        experts_per_token=shape.experts_per_token if decoder else 1,
        shared_ffn=shape.shared_ffn_size if decoder else 0,
        causal=shape.causal, peak_16bit=0, memory_bytes_per_s=0, intra_bytes_per_s=0,
        inter_bytes_per_s=0, devices=1, global_batch=1,
    )  # fmt: skip


def _memory_rate(here: Machine) -> float:
    rate = here.device.memory_bytes_per_s
    if rate is None:
        raise UserError(here.device.name, "has no memory rate in the catalog")
    return rate


def _told(
    question: Question, spec: RunSpec, here: Machine, x: Cases, evidence: Evidence
) -> Estimate:
    fit = evidence.fit()
    coefficients = named(fit.centre)
    time = followed_step(x, coefficients)
    seconds = float(time.total[0])
    low, high = bounds(time.total, log_sd(x, fit, evidence.residual_sd))
    frameworks = frameworks_of(here.generation, native=question.native)
    needed = memory(x, frameworks, here.device.context_bytes)
    size = here.device.memory_bytes
    rate = tokens_per_s(spec.training.seq_len, spec.training.global_batch, seconds)
    flops_input = FlopsInput(spec.model, spec.training.seq_len, lora=spec.lora)
    per_sample = spec.training.seq_len * model_flops_per_token(spec.flops_convention, flops_input)
    reached = flops_per_s_per_device(
        per_sample, spec.training.global_batch, seconds, spec.world_size
    )
    tokens = question.tokens or spec.training.total_tokens
    return Estimate(
        recipe=spec.recipe,
        device=here.device.name,
        devices=spec.world_size,
        layout=spec.layout.label(spec.world_size),
        dtype=spec.training.dtype,
        stack="torch" if here.generation == "cpu" else question.stack,
        step_time_s=seconds,
        low_s=float(low[0]),
        high_s=float(high[0]),
        parts=time.at(0),
        tokens_per_s=rate,
        samples_per_s=spec.training.global_batch / seconds,
        flops_per_s_per_device=reached,
        # A measured peak is no data sheet's.
        mfu=None if here.generation == "cpu" else mfu(reached, here.device.peak_flops_per_s(spec.training.dtype)),
        convention=spec.flops_convention,
        reachable=coefficients.get(f"gemm_{here.generation}", float("nan")),
        memory_bytes=MemoryBytes(
            allocated=float(needed.allocated[0]), reserved=float(needed.reserved[0]),
            device_used=float(needed.device_used[0]), parts=needed.at(0),
        ),
        p_oom=None if size is None else float(p_oom(needed, size)[0]),
        bill=bill(tokens, rate, spec.world_size, here.device.power_w, question.prices,
                  question.failures) if tokens else None,
        waterfall=waterfall(x, coefficients, time, reached * seconds),
        evidence=basis_of(evidence, here, question.intra_link, question.inter_link),
        notes=here.notes,
    )  # fmt: skip
