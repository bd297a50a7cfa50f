"""Conversion of a resolved run on a machine to a case: software, model and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, cast

import numpy as np

from paceline.core.errors import UserError
from paceline.core.flops import attended_keys
from paceline.core.layout import AXIS_FIELDS, Layout
from paceline.core.mmdit import MMDiTShape
from paceline.core.recompute import RecomputeLevel, block_levels, level_shares
from paceline.core.run import RunSpec
from paceline.core.shape import (
    DecoderShape,
    LoraSpec,
    LoraTarget,
    Shape,
    linear_sizes,
    matrices_per_token,
    num_parameters,
    parameter_parts,
    trainable_parameters,
)
from paceline.estimate.fit.origin import (
    ANY,
    IMPLEMENTATION_OF,
    WHOLE_EXPERTS,
    expert_cuda_graphs,
    own_kernels,
    stores_scores,
    visits_tensors,
    year_of_release,
)
from paceline.estimate.model.case import (
    Case,
    Cases,
    CudaGraphs,
    Dispatcher,
    Floats,
    Implementation,
    cases_of,
    cases_with,
)
from paceline.estimate.model.collectives import LATENCIES
from paceline.estimate.model.machine import FOUR_BIT, Machine
from paceline.estimate.model.weights import block_weights, trained_tensors

AXES = (*AXIS_FIELDS, "micro_batch", "zero_stage", "sequence_parallel")
"""Fields that a layout and a case have under the same name."""
RECOMPUTE_FIELDS: dict[str, RecomputeLevel] = {
    "full_recompute": "full",
    "ffn_recompute": "ffn",
    "activation_recompute": "activation",
}
"""Fields of a case that are shares of blocks, with the recomputation level of each."""
SOFTWARE_OF_ENGINE = {
    "deepspeed_chat": "deepspeed",
    "hf_trainer": "hf",
    "megatron_deepspeed": "megatron-deepspeed",
    "torchtitan": "torchtitan",
}
"""Software of engines with published steps whose blocks are not fused."""
SHARED_INPUT: dict[LoraTarget, LoraTarget] = {"k": "q", "v": "q", "gate": "up"}
"""Layers that share the input of another layer."""
INPUT_PARTS: tuple[LoraTarget, ...] = ("o", "down")
"""Layers whose input is sharded over tensor-parallel ranks."""


@dataclass(frozen=True)
class Software:
    """Training software."""

    implementation: Implementation = "fused"
    compiled: bool = False
    native: bool = False
    """True if memory follows the constants of Paceline's own trainer, as on CPUs always."""
    name: str = ANY
    """Name in `fit/origin.py`; published steps of that software narrow the interval."""
    cuda_graphs: CudaGraphs = "none"
    """Part of a step that is captured in CUDA graphs."""
    software_date: float = Case.software_date
    """Release date as a decimal year; default the newest with published steps."""
    dispatcher: Dispatcher = "any"
    """MoE token dispatcher."""

    @property
    def known_as(self) -> str:
        """Name for `parse_software` without the release: the software, else the implementation."""
        return self.implementation if self.name == ANY else self.name

    def implementation_on(self, machine: Machine) -> Implementation:
        """Return the implementation of blocks on a machine; on a CPU always PyTorch modules."""
        return "torch" if machine.generation == "cpu" else self.implementation


def parse_software(
    name: str, compiled: bool = False, native: bool = False, cuda_graphs: CudaGraphs = "none"
) -> Software:
    """Return the software for a name of `fit/origin.py` or of an implementation.

    A suffix selects a release: `nemo@26.02`.
    """
    base, _, release = name.partition("@")
    software_date = year_of_release(release) or Case.software_date
    if base in IMPLEMENTATION_OF:
        return Software(IMPLEMENTATION_OF[base], compiled, native, base, cuda_graphs, software_date)
    return Software(cast(Implementation, base), compiled, native, ANY, cuda_graphs, software_date)


def software_of(spec: RunSpec) -> Software:
    """Return the software of a run's engine."""
    native, compiled = spec.engine == "native", spec.training.compile != "none"
    if native:
        return Software("torch", compiled, native)
    return parse_software(software_name(spec.engine), compiled)


def software_name(engine: str) -> str:
    """Return the software of an engine for `parse_software`, `any` (fused blocks) if unknown.

    An estimate without a run is of no particular software if the recipe's engine is `native`.
    """
    return SOFTWARE_OF_ENGINE.get(engine, ANY)


def case_of(spec: RunSpec, machine: Machine, software: Software) -> Case:
    """Return the case of a run on a machine.

    Raises UserError for bf16 if the device has only fp16, and for a device without rates.
    """
    layout, training, device = spec.layout, spec.training, machine.device
    if training.dtype == "bf16" and device.has_only_fp16:
        raise UserError(
            device.name,
            "does not compute in bf16",
            allowed=", ".join(device.peaks),
            remedy="--set training.dtype=fp16",
        )
    if device.memory_bytes_per_s is None:
        raise UserError(device.name, "has no memory bandwidth in the catalog")
    shape, release = _shape(spec.model), (software.name, software.software_date)
    graphs = expert_cuda_graphs(*release, machine.generation, machine.domain, training.dtype)
    is_explicit = software.cuda_graphs != "none" and graphs != "iteration"
    graphs = software.cuda_graphs if is_explicit or shape.experts <= 1 else graphs
    case = replace(
        shape,
        seq_len=training.seq_len,
        document=_document_tokens(spec.model, training.seq_len),
        devices=spec.world_size,
        global_batch=training.global_batch,
        frozen=spec.lora is not None,
        **_recompute_shares(spec.model, layout),
        selective_recompute=layout.recompute == "selective",
        implementation=software.implementation_on(machine),
        compiled=software.compiled,
        cuda_graphs=graphs,
        flash=software.implementation != "softmax" and not stores_scores(*release),
        peak_16bit=machine.peak_wide(training.dtype),
        peak_narrow=machine.peak_narrow(training.dtype),
        memory_bytes_per_s=device.memory_bytes_per_s,
        intra_bytes_per_s=machine.intra_bytes_per_s,
        inter_bytes_per_s=machine.inter_bytes_per_s,
        inter_measured=machine.inter_measured,
        generation=machine.generation,
        domain=machine.domain,
        power=machine.power,
        mesh=machine.mesh,
        cpu_oversubscription=machine.cpu_oversubscription,
        scattered=machine.scattered,
        **_levels(machine),
        software=software.name,
        software_date=software.software_date,
        dispatcher=software.dispatcher,
        ep_overlap="on" if shape.experts > 1 and graphs == "iteration" else "any",
        whole_experts=software.name in WHOLE_EXPERTS,
        proxied=machine.proxied,
        family=device.family,
        assumed_intra=machine.assumed_properties.intra,
        assumed_inter=machine.assumed_properties.inter,
        assumed_device=machine.assumed_properties.device,
        four_bit=training.dtype in FOUR_BIT,
        block_scaled=training.dtype in ("mxfp8", *FOUR_BIT),
        **{name: getattr(layout, name) for name in AXES},
    )
    if case.experts > 1:
        case = replace(case, **own_kernels(*release, training.dtype))
    if visits_tensors(software.name, training.dtype):
        num_adapted = len(spec.lora.targets) if spec.lora else 0
        tensors = trained_tensors(case.layers, case.gated, num_adapted)
        if spec.lora and not spec.lora.train_rest:
            tensors = case.layers * 2 * num_adapted
        case = replace(case, param_tensors=tensors)
    return with_memory(case, spec)


def _levels(machine: Machine) -> dict[str, float]:
    """Return the case fields that a declared fabric sets, in addition to domain and network."""
    numbers: dict[str, float] = dict(
        zip(LATENCIES, (level.latency_s for level in machine.levels), strict=False)
    )
    for name, below, level in zip(
        ("leaf", "pod"), machine.levels[1:], machine.levels[2:], strict=False
    ):
        numbers |= {name: below.devices, f"{name}_bytes_per_s": level.bytes_per_s}
    return numbers


def cases_of_layouts(
    spec: RunSpec, machine: Machine, software: Software, layouts: Sequence[Layout]
) -> Cases:
    """Return the cases of a run in many layouts; raises UserError as `case_of` does."""
    case = case_of(spec, machine, software)
    return cases_with(
        case,
        _columns(spec.model, layouts) | _vocabularies(spec.model, layouts),
        {
            "schedule": np.array([layout.schedule for layout in layouts]),
            "cp_exchange": np.array([layout.cp_exchange for layout in layouts]),
        },
    )


def _document_tokens(shape: Shape, seq_len: int) -> float:
    """Return the tokens that a token attends to before masking; 0 means the whole sample."""
    keys = attended_keys(shape, seq_len)
    return keys if keys < seq_len else 0.0


def _columns(shape: Shape, layouts: Sequence[Layout]) -> dict[str, Floats]:
    """Return the fields of a case that a layout sets, one value per layout."""
    columns = {name: [getattr(layout, name) for layout in layouts] for name in AXES}
    shares = [_recompute_shares(shape, layout) for layout in layouts]
    columns |= {name: [share[name] for share in shares] for name in RECOMPUTE_FIELDS}
    columns["selective_recompute"] = [layout.recompute == "selective" for layout in layouts]
    columns["dp_shard"] = [layout.dp_shard or 0 for layout in layouts]
    columns["gradients_once"] = [layout.gradient_sync == "last" for layout in layouts]
    return {name: np.array(values, dtype=float) for name, values in columns.items()}


def _recompute_shares(shape: Shape, layout: Layout) -> dict[str, float]:
    """Return the shares of the blocks that are recomputed, by level."""
    shares = level_shares(block_levels(shape, layout))
    return {name: shares[level] for name, level in RECOMPUTE_FIELDS.items()}


def _vocabularies(shape: Shape, layouts: Sequence[Layout]) -> dict[str, Floats]:
    """Return the rows of the embedding per layout, with the padding for tensor parallelism."""
    if shape.kind == "mmdit":
        return {}
    rows = {tp: float(shape.padded_vocab(tp)) for tp in {layout.tp for layout in layouts}}
    return {"vocab": np.array([rows[layout.tp] for layout in layouts])}


def _shape(shape: Shape) -> Case:
    """Return a case with only the model's sizes.

    An MMDiT counts as blocks of 12 h^2 without a head. Multi-token-prediction layers count as
    blocks.
    """
    decoder = isinstance(shape, DecoderShape)
    latent = shape.latent_attention if decoder else None
    return Case(
        layers=shape.num_layers + (shape.mtp_layers if decoder else 0),
        hidden=shape.hidden_size,
        ffn=shape.ffn_size,
        heads=shape.num_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=shape.padded_vocab() if decoder else 0.0,
        seq_len=0,
        gated=decoder and shape.gated_ffn,
        experts=shape.num_experts if decoder else 1,
        experts_per_token=shape.experts_per_token if decoder else 1,
        expert_groups=shape.expert_groups if decoder else 1,
        groups_per_token=shape.groups_per_token if decoder else 1,
        shared_ffn=shape.shared_ffn_size if decoder else 0,
        dense_share=shape.first_dense_layers / shape.num_layers if decoder else 0,
        mtp_layers=shape.mtp_layers if decoder else 0,
        score_width=latent.mean_head_dim if latent else 0,
        relu=decoder and shape.activation == "relu",
        latents=latent.saved_latents if latent else 0,
        causal=shape.causal,
        peak_16bit=0,
        memory_bytes_per_s=0,
        intra_bytes_per_s=0,
        inter_bytes_per_s=0,
        devices=1,
        global_batch=1,
    )


def with_memory(case: Case, spec: RunSpec) -> Case:
    """Return the case with its schedule, embeddings, bytes per number and adapters.

    If embeddings and norms are trained in addition to adapters, they count as adapters, as in the
    time model, except for the gradient that a loss computes for the head.
    """
    shape, layout, lora = spec.model, spec.layout, spec.lora
    case = replace(
        case,
        schedule=layout.schedule,
        dp_shard=float(layout.dp_shard or 0),
        gradients_once=layout.gradient_sync == "last",
        compute_bytes=4.0 if spec.training.dtype == "fp32" else 2.0,
        half=spec.training.dtype == "fp16",
        cp_exchange=layout.cp_exchange,
    )
    if lora is not None:
        trained_share = trainable_parameters(shape, lora) / num_parameters(shape)
        sizes = linear_sizes(shape)
        widths = sum(
            sum(sizes[name]) * matrices_per_token(shape, name)
            for name in lora.targets
            if name in sizes
        )
        case = replace(
            case,
            frozen=True,
            trained_share=trained_share,
            trains_head=lora.train_rest,
            adapter_rank=lora.rank,
            adapter_widths=widths,
            **_adapters(shape, lora),
        )
    if shape.kind == "mmdit":
        # The time model's blocks of 12 h^2 represent its GEMMs; the remaining parameters count as
        # other weights.
        case = replace(case, latents=_extra_block_activations(shape, case.compiled))
        return _with_other_weights(case, num_parameters(shape))
    if shape.latent_attention is not None or shape.first_dense_layers or shape.mtp_layers:
        parts = parameter_parts(shape)
        case = _with_other_weights(case, parts["blocks"] + parts["mtp"])
    has_learned_positions = shape.positions == "learned"
    is_native = spec.engine == "native"
    return replace(
        case,
        drops_stream=is_native and shape.dropout > 0,
        drops_scores=is_native and shape.dropped_probabilities > 0,
        vocab=float(shape.padded_vocab(layout.tp)),
        table_width=float(shape.embedding_size or 0),
        tied=shape.tied_embeddings,
        positions=float(shape.max_positions + shape.position_offset)
        if has_learned_positions
        else 0.0,
    )


class Adapters(TypedDict):
    """Fields of a case."""

    adapter_inputs: float
    adapter_parts: float
    adapter_inner: float
    adapter_drops: bool


def _adapters(shape: Shape, lora: LoraSpec) -> Adapters:
    """Return the activations that adapters save.

    With dropout each adapter saves its own input; without, layers that share an input save it once.
    Attention saves its output itself.
    """
    drops, inputs, sizes = lora.dropout > 0, dict[LoraTarget, int](), linear_sizes(shape)
    targets: list[LoraTarget] = [name for name in sizes if name in lora.targets]
    for name in targets:
        if drops or name != "o":
            input_name = name if drops else SHARED_INPUT.get(name, name)
            inputs[input_name] = sizes[name][0] * matrices_per_token(shape, name)
    parts = sum(width for name, width in inputs.items() if name in INPUT_PARTS)
    return Adapters(
        adapter_inputs=sum(inputs.values()) - parts,
        adapter_parts=parts,
        adapter_inner=lora.rank * sum(matrices_per_token(shape, name) for name in targets),
        adapter_drops=drops,
    )


def _extra_block_activations(shape: MMDiTShape, compiled: bool) -> float:
    """Return the numbers per token that an MMDiT block saves beyond the 16 h of a plain one (mean).

    A double block adds 8 h: both norms' outputs before modulation, queries, keys and values by
    stream, attention's output by stream, and the outputs of both last GEMMs, which their gates
    multiply. A single block adds 3 h: the same of its one norm, queries and keys before their
    norms, attention's output joined with the MLP's, the GEMM's output, minus one norm and its
    modulated output. Compilers recompute norm outputs.
    """
    recomputed_norms = 1 if compiled else 0
    double, single = 8 - 2 * recomputed_norms, 3 - recomputed_norms
    blocks = double * shape.num_double_blocks + single * shape.num_single_blocks
    return shape.hidden_size * blocks / shape.num_layers


def _with_other_weights(case: Case, parameters: float) -> Case:
    """Return the case with `parameters` in its blocks, including those outside of GEMMs."""
    matrix_parameters = float(block_weights(cases_of([case]))[0])
    return replace(case, more_weights=parameters / case.layers - matrix_parameters)
