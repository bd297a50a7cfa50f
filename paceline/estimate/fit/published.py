"""Rows of published tables as cases: the meaning of each column, and defaults for gaps.

A row is excluded only for one of REASONS. Only the last reason depends on the step time: a step
that is shorter than its GEMMs at the peak belongs to another batch or model than the row states.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Literal

from paceline.core.bandwidth import parse_bandwidth
from paceline.core.errors import UserError
from paceline.core.hardware import Dtype
from paceline.estimate.fit.origin import (
    ANY,
    IMPLEMENTATION_OF,
    JAX,
    release_of,
    software_of,
    stores_scores,
    visits_tensors,
    year_of,
)
from paceline.estimate.fit.row_details import (
    Experts,
    dense_block_fields,
    expert_fields,
    experts_of,
    gate_by_size,
    has_adapters,
    head_width,
    is_gated,
    matrix_widths,
    recompute_fields,
    score_width,
    with_chat_adapters,
)
from paceline.estimate.model.case import Case, Implementation, cases_of
from paceline.estimate.model.machine import FOUR_BIT, NARROW, machine
from paceline.estimate.model.weights import block_weights, trained_tensors
from paceline.files import catalog

Kind = Literal["dense", "moe", "lora", "first step"]
NO_TIME = "no step time"
NO_SHAPE = "layers, hidden size or heads are missing"
NO_LAYOUT = "the number of devices or the batch is missing"
NO_DEVICE = "the device is not in the catalog"
NO_EXPERTS = "the number of experts or of experts per token is missing"
IMPOSSIBLE = "the step time is too short: the batch would exceed the device's peak FLOP/s"
REASONS = (NO_TIME, NO_SHAPE, NO_LAYOUT, NO_DEVICE, NO_EXPERTS, IMPOSSIBLE)

DEFAULT_SEQ_LEN = 512
"""Sequence length of fine-tuning scripts that state none (DeepSpeed-Chat's default)."""
DEFAULT_VOCAB = 50_304
ADAPTER_RANK = 16
ADAPTS_ALL = ("automodel",)
"""Software whose recipes adapt all matrices of a block (Automodel's `*_proj`), not only queries,
keys and values."""
CHAT_ADAPTED_MATRICES = 6
"""Number of a block's matrices with adapters in DeepSpeed-Chat."""
VOCAB_MULTIPLE = 128
"""Factor of Megatron's padding: the embedding's rows are a multiple of this x tp."""
DEEP_PIPELINE, FEW_PER_STAGE, MIN_LAYERS = 8, 3, 1.9
"""Limits for an assumed interleaved pipeline: minimum stages, maximum micro-batches per stage, and
minimum layers per chunk."""
DEFAULT_DOCUMENT = 512
"""Tokens of each sample that fine-tuning packs into a sequence, if not stated."""
_TUNED = re.compile(r"\blora\b|\bsft\b|fine-?tun", re.IGNORECASE)
_LORA = re.compile(r"task=lora|\blora (rank|finetun)", re.IGNORECASE)
_MOCK = re.compile(r"\bmock data\b", re.IGNORECASE)
_SHARDED = re.compile(r"\bFSDP=1\b")
_EXPERTS = re.compile(
    r"[-_ ]a\d+(\.\d+)?b|\d+x\d+(\.\d+)?b|moe|oss|mixtral|dbrx|deepseek|grok|experts"
    r"|llama[-_ ]?4(?!\d)",
    re.IGNORECASE,
)
_FIRST_STEP = re.compile(r"\b(1st|first)( step| iteration)? after (re)?start", re.IGNORECASE)
_ZERO_BUBBLE = re.compile(r"dualpipe|schedule (zero-bubble|zb)", re.IGNORECASE)
"""Schedules whose bubble is about a third of that of 1F1B. DualPipe's is (p/2 - 1)(F + 2B - 3W) of
F + B = 3 and W = 1, so 14 of 45 for 16 ranks (arXiv:2412.19437, table 2)."""
_FUSED = re.compile(r"\bte\b")
_AMBIGUOUS_SOFTWARE = (ANY, "megatron", "megatron-deepspeed")
"""Software whose name alone does not determine its implementation, which changed over the years."""
_FLASH = ("nemo", "primus", "torchtitan", "native", "deepspeed", "hf", "automodel", *JAX)
_STAGE = re.compile(r"(?:zero|stage)?[-_ ]*([0-3])(?![\d.])")
_PREFIXES: dict[str, Dtype] = {
    "mxfp8": "mxfp8", "fp8-mx": "mxfp8", "fp8_mx": "mxfp8", "fp8": "fp8", "nvfp4": "nvfp4",
    "mxfp4": "mxfp4", "fp4": "nvfp4", "fp32": "fp32", "fp16": "fp16",
}  # fmt: skip
MAX_SIZE = 1e12
"""Maximum plausible size in a table; larger numbers count as gaps, as do numbers that are not
positive."""


class UnsupportedRowError(ValueError):
    """A row that cannot be modelled; the message is one of REASONS."""


@dataclass(frozen=True)
class PublishedStep:
    """One published measurement."""

    id: str
    source: str
    kind: Kind
    case: Case
    measured_s: float
    memory_gb: float | None
    software: str
    """Name in origin.SOFTWARE, or "any"."""
    device: str
    """Device family in the catalog."""
    year: int | None


def read_row(row: Mapping[str, str]) -> PublishedStep:
    """Return a row as a case; raises UnsupportedRowError with one of REASONS.

    A value that is not a positive number is a gap. Defaults for gaps: micro-batch, tp, pp, cp, vp
    and ep are 1; kv heads are heads; ffn is 4 x hidden; the vocabulary 50,304; the sequence 512;
    recomputation none if all activations fit into the device's memory, else full. A pipeline with
    more stages than layers counts as not stated, except two more, for embedding and head. Megatron
    pads the vocabulary. Fine-tuning packs samples of 512 tokens unless data are mock data, and
    adapters of rank 16 are on the attention's inputs (NeMo's defaults) or on all matrices
    (Automodel's). A dtype narrower than the device supports is emulated: numbers are rounded and
    multiplied in 16 bit, and the row has a wider interval. Data-parallel ranks are
    devices / (tp pp cp), whatever the row states.
    """
    measured = _number(row, "step_time_s") or _step_of_rate(row)
    if measured is None:
        raise UnsupportedRowError(NO_TIME)
    kind = kind_of(row)
    experts = _experts(row)
    if kind == "moe" and experts is None:
        raise UnsupportedRowError(NO_EXPERTS)
    case = _case(row, kind, experts)
    if kind == "dense" and measured < _min_step_time_s(case):
        raise UnsupportedRowError(IMPOSSIBLE)
    name, memory = row.get("id", ""), _number(row, "mem_gb")
    family = catalog.find_device(row.get("gpu", "")).device.family
    return PublishedStep(
        id=name,
        source=row.get("source", ""),
        kind=kind,
        case=case,
        measured_s=measured,
        memory_gb=memory,
        software=software_of(row),
        device=family,
        year=year_of(row),
    )


def _step_of_rate(row: Mapping[str, str]) -> float | None:
    """Return the step time by the tokens/s of the whole run: global batch x sequence / rate."""
    rate, *sizes = (_number(row, name) for name in ("tokens_per_s", "gbs", "seq_len"))
    if rate is None or None in sizes:
        return None
    return prod(size for size in sizes if size) / rate


def _min_step_time_s(case: Case) -> float:
    """Return the seconds of the GEMMs of all blocks at the peak, without recomputation.

    It counts 6 FLOP per parameter and token. Tables whose header and rows disagree about the batch
    have shorter steps.
    """
    x = cases_of([case])
    flops = 6 * case.layers * float(block_weights(x)[0]) * case.global_batch * case.seq_len
    return flops / (max(case.peak_16bit, case.peak_narrow) * case.devices)


def kind_of(row: Mapping[str, str]) -> Kind:
    """Return moe, lora or dense, by the model's name, the notes and expert parallelism.

    A step right after a start is a separate kind, because it also sets up communicators and caches.
    """
    model, notes = row.get("model", ""), row.get("notes", "")
    if "lora" in model.lower() or _LORA.search(notes):
        return "lora"
    several = (_number(row, "ep") or 1) > 1 or (_count(row) or 1) > 1
    if several or _EXPERTS.search(model):
        return "moe"
    return "first step" if _FIRST_STEP.search(notes) else "dense"


def implementation_of(row: Mapping[str, str]) -> Implementation:
    """Return the framework's implementation by the name of its attention.

    "softmax" is in rows of Megatron up to 2022; "TE", "unfused" and "local" in those of Megatron
    core and NeMo; "flash" or nothing, with ZeRO-3 or no ZeRO at all, in those of PyTorch modules,
    which have no pipelines; other names of flash attention in a pipeline are not of them. The
    software that a row states counts if its attention is not
    conclusive.
    """
    attention = row.get("attention_impl", "").lower()
    if "softmax" in attention:
        return "softmax"
    core = attention in ("transformer_engine", "unfused", "local") or bool(_FUSED.search(attention))
    software = software_of(row)
    if software not in _AMBIGUOUS_SOFTWARE and not core:
        return IMPLEMENTATION_OF[software]
    pipeline = (_number(row, "pp") or 1) > 1
    is_flash, is_sharded = attention.startswith("flash"), zero_stage(row.get("zero", "")) == 3
    plain_core = is_flash and (pipeline or (attention == "flash" and not is_sharded))
    return "fused" if core or plain_core else "torch"


def zero_stage(text: str) -> int:
    """Return the ZeRO stage, 0 to 3; any optimizer with sharded states is stage 1."""
    plain = text.strip().lower()
    stage = _STAGE.match(plain)
    if stage and stage[1] != "0":
        return int(stage[1])
    if plain.startswith(("fsdp", "hsdp")):
        return 3
    return 1 if "sharded" in plain else 0


def _count(row: Mapping[str, str]) -> float | None:
    return _number(row, "n_experts") or _number(row, "num_experts")


def _experts(row: Mapping[str, str]) -> Experts | None:
    """Return the experts that a row states, else its family's; None if neither is known."""
    number, per_token = _count(row), _number(row, "topk")
    family = experts_of(row.get("model", ""))
    if not (number and per_token):
        return family
    ffn = _number(row, "moe_ffn") or _number(row, "ffn") or (family.width if family else 0.0)
    shared = _number(row, "n_shared_experts") or 0.0
    return Experts(number, per_token, ffn, shared) if ffn else None


def _case(row: Mapping[str, str], kind: Kind, experts: Experts | None) -> Case:
    layers, hidden, heads = (_number(row, name) for name in ("layers", "hidden", "heads"))
    devices, batch = _number(row, "num_gpus"), _number(row, "gbs")
    if not (layers and hidden and heads):
        raise UnsupportedRowError(NO_SHAPE)
    if not (devices and batch):
        raise UnsupportedRowError(NO_LAYOUT)
    per_node = int(_number(row, "gpus_per_node") or 8)
    try:
        hardware = machine(
            row.get("gpu", ""), _link(row, "intra_node_net"), _link(row, "inter_node_net"), per_node
        )
        hardware.peak_16bit()
    except UserError as error:
        raise UnsupportedRowError(NO_DEVICE) from error
    dtype = dtype_of(row.get("dtype", ""))
    narrow = hardware.device.peak_flops_per_s(dtype) if dtype in NARROW else None
    is_emulated = dtype in NARROW and narrow is None
    axes = {name: _number(row, name) or 1.0 for name in ("tp", "cp", "vp", "ep")}
    pp, ffn = _number(row, "pp") or 1.0, _number(row, "ffn") or 4 * hidden
    if kind != "moe" or experts is None:
        experts = Experts(1, 1, ffn)
    model, implementation, ffn = row.get("model", ""), implementation_of(row), experts.width
    kv_heads = _number(row, "kv_heads") or heads
    width = head_width(model) or hidden / heads
    software, attention = software_of(row), row.get("attention_impl", "").lower()
    replicas = max(1.0, devices / (pp * axes["tp"] * axes["cp"]))
    software_date = release_of(row) or Case.software_date
    case = Case(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=ffn,
        kv_heads=kv_heads,
        head_dim=width,
        score_width=score_width(model),
        vocab=_vocabulary(row, implementation, axes["tp"]),
        seq_len=_number(row, "seq_len") or DEFAULT_SEQ_LEN,
        peak_16bit=hardware.peak_wide(dtype),
        peak_narrow=narrow or 0.0,
        memory_bytes_per_s=hardware.device.memory_bytes_per_s or 0.0,
        intra_bytes_per_s=hardware.intra_bytes_per_s,
        inter_bytes_per_s=hardware.inter_bytes_per_s,
        devices=devices,
        global_batch=batch,
        gated=_is_gated(row, layers, hidden, ffn, kv_heads / heads, experts.number > 1),
        frozen=kind == "lora" or has_adapters(row),
        experts=experts.number,
        experts_per_token=experts.per_token,
        shared_ffn=experts.shared * experts.width,
        pp=1.0 if pp > layers + 2 else pp,
        micro_batch=_number(row, "mbs") or (batch / replicas if software in JAX else 1.0),
        zero_stage=3 if _SHARDED.search(row.get("notes", "")) else zero_stage(row.get("zero", "")),
        sequence_parallel=row.get("seq_parallel", "").strip().lower()
        in ("1", "1.0", "true", "yes"),
        flash=_is_flash(attention, software, software_date),
        compiled="compile" in row.get("notes", ""),
        generation=hardware.generation,
        domain=hardware.domain,
        power=hardware.power,
        four_bit=dtype in FOUR_BIT,
        block_scaled=dtype in ("mxfp8", *FOUR_BIT),
        implementation=implementation,
        mesh=hardware.mesh,
        assumed_intra=hardware.assumed_properties.intra,
        assumed_inter=hardware.assumed_properties.inter,
        assumed_device=hardware.assumed_properties.device or is_emulated,
        tp=axes["tp"],
        cp=axes["cp"],
        vp=_chunks(row, implementation, layers, pp, axes),
        ep=axes["ep"],
        software_date=software_date,
        proxied=hardware.proxied,
        software=software if row.get("stack") else ANY,
        family=hardware.device.family,
        document=_document(row),
        schedule="zero-bubble" if _ZERO_BUBBLE.search(row.get("notes", "")) else "1f1b",
    )
    if kind == "moe":
        case = replace(case, **expert_fields(row, case, software, dtype))
        if first := _number(row, "first_dense_layers"):
            width = _number(row, "ffn") if _number(row, "moe_ffn") else None
            case = replace(case, **dense_block_fields(first, width, case))
    if case.frozen:
        widths = matrix_widths(case) if software in ADAPTS_ALL else _qkv_width(case)
        case_with_adapters = replace(case, adapter_rank=ADAPTER_RANK, adapter_widths=widths)
        case = with_chat_adapters(case) if has_adapters(row) else case_with_adapters
    if visits_tensors(software, dtype):
        adapted_matrices = CHAT_ADAPTED_MATRICES if case.frozen else 0
        case = replace(case, param_tensors=trained_tensors(layers, case.gated, adapted_matrices))
    return replace(case, **recompute_fields(row, case, hardware.device.memory_bytes))


def _is_flash(attention: str, software: str, software_date: float) -> bool:
    """Return True if attention does not store scores; by default this depends on the software."""
    if not attention:
        return software in _FLASH and not stores_scores(software, software_date)
    return attention not in ("unfused", "local") and "softmax" not in attention


def _chunks(
    row: Mapping[str, str],
    implementation: Implementation,
    layers: float,
    pp: float,
    axes: Mapping[str, float],
) -> float:
    """Return the chunks per stage: as stated, else 1, or more with few micro-batches per stage.

    Runs with fewer than three micro-batches per stage interleave. The number of chunks is then the
    largest one, with at least two layers per chunk, that divides the layers, or the layers plus
    both ends.
    """
    chunks_per_stage, batch = _number(row, "vp"), _number(row, "gbs") or 1.0
    replicas = (_number(row, "num_gpus") or 1.0) / (axes["tp"] * axes["cp"] * pp)
    has_few = batch / max(1.0, replicas) / (_number(row, "mbs") or 1.0) < FEW_PER_STAGE * pp
    if chunks_per_stage or implementation != "fused" or pp < DEEP_PIPELINE or not has_few:
        return chunks_per_stage or 1.0
    whole = (chunks for chunks in range(8, 1, -1) if layers / pp / chunks >= MIN_LAYERS)
    even = (n for n in whole if not (layers % (pp * n) and (layers + 2) % (pp * n)))
    return float(next(even, 1))


def _is_gated(
    row: Mapping[str, str],
    layers: float,
    hidden: float,
    ffn: float,
    groups: float,
    has_experts: bool,
) -> bool:
    """Return `is_gated` for a row; `groups` are key heads divided by heads.

    Experts have a gate unless the row states the opposite.
    """
    statement = f"{row.get('mlp_kind') or ''} {row.get('notes', '')}"
    if has_experts:
        return is_gated("", 0.5, statement)
    tables = hidden * (_number(row, "vocab") or DEFAULT_VOCAB)
    without = tables + layers * hidden * (hidden * (2 + 2 * groups) + 2 * ffn)
    model = row.get("model", "")
    by_size = gate_by_size(model, without, layers * hidden * ffn)
    return is_gated(model, ffn / hidden, statement, by_size)


def is_tuned(row: Mapping[str, str]) -> bool:
    """Return True if a row states that it is fine-tuning."""
    return bool(_TUNED.search(f"{row.get('model', '')} {row.get('notes', '')}"))


def _document(row: Mapping[str, str]) -> float:
    """Return the tokens of a packed sample; 0 if samples are not packed, as those of mock data."""
    packs = is_tuned(row) and not _MOCK.search(row.get("notes", ""))
    return DEFAULT_DOCUMENT if packs else 0.0


def _vocabulary(row: Mapping[str, str], implementation: Implementation, tp: float) -> float:
    """Return the rows of the embedding: Megatron pads them, PyTorch modules do not."""
    rows = _number(row, "vocab") or DEFAULT_VOCAB
    multiple = VOCAB_MULTIPLE * tp if implementation != "torch" else 1.0
    return ceil(rows / multiple) * multiple


def _qkv_width(case: Case) -> float:
    """Return the inputs plus outputs of the joint matrix of queries, keys and values."""
    return case.hidden + (case.heads + 2 * case.kv_heads) * case.head_dim


def dtype_of(text: str) -> Dtype:
    """Return the dtype for a word in a table; bf16 for unknown words."""
    word = text.strip().lower()
    for prefix, dtype in _PREFIXES.items():
        if word.startswith(prefix):
            return dtype
    try:
        return catalog.dtype(word)
    except UserError:
        return "bf16"


def _link(row: Mapping[str, str], name: str) -> str | None:
    """Return a link that is in the catalog or states its rate; None selects the default."""
    text = (row.get(name) or "").strip()
    if parse_bandwidth(text, 1):
        return text
    try:
        return text if text and catalog.find_link(text) else None
    except UserError:
        return None


def _number(row: Mapping[str, str], name: str) -> float | None:
    """Return a positive number; None for text, 0, and implausible values."""
    try:
        value = float((row.get(name) or "").strip())
    except ValueError:
        return None
    minimum = 0.0 if name in ("step_time_s", "mem_gb") else 1.0
    return value if value and minimum <= value <= MAX_SIZE else None
