"""Details of a published row's model, software and settings that its columns do not state.

Shapes are those of the models' public configurations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import log, prod
from typing import NamedTuple, TypedDict

from paceline.core.hardware import Dtype
from paceline.core.layout import MODEL_AXES
from paceline.estimate.fit.origin import (
    WHOLE_EXPERTS,
    OwnKernels,
    expert_cuda_graphs,
    own_kernels,
)
from paceline.estimate.model.case import Case, CudaGraphs, Dispatcher, EpOverlap, cases_of
from paceline.estimate.model.weights import block_weights, table_weights

GATED = re.compile(
    r"llama|qwen|mi[sx]tral|deepseek|gemma|grok|phi[-_ ]?[34]|gpt[-_ ]?oss|palm|\bglm|chatglm|kimi"
    r"|\byi\b|yi[-_ ]\d|olmo|internlm|baichuan|command|cohere|granite|exaone|smollm|minicpm"
    r"|stablelm|dbrx|hunyuan|ernie[-_ ]?4|falcon[-_ ]?3|vicuna|alpaca|aquila|jamba|arctic|solar"
    r"|zephyr",
    re.IGNORECASE,
)
"""Model families with a gated ffn."""
PLAIN = re.compile(
    r"\bgpt(?![-_ ]?oss)|\bopt\b|bloom|falcon|nemotron|\bmpt\b|neox|pythia|cerebras|gopher|turing"
    r"|chinchilla|mt[-_ ]?nlg|starcoder|codegen|megatron|bigscience|\bbert|phi[-_ ]?[12]|minitron",
    re.IGNORECASE,
)
"""Model families whose ffn has two matrices, with GELU or squared ReLU, whatever its width."""
_BILLIONS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*([bt])(?![a-z])", re.IGNORECASE)
_CLEAR = 0.04
"""Minimum difference of the log distances to the stated number of parameters that decides."""


class Experts(NamedTuple):
    """Number and sizes of a block's experts."""

    number: float
    per_token: float
    width: float
    shared: float = 0
    """Number of shared experts of the same width, which all tokens pass."""


_EXPERTS: tuple[tuple[str, Experts], ...] = (
    (r"gpt[-_ ]?oss[-_ ]?120b", Experts(128, 4, 2880)),
    (r"gpt[-_ ]?oss[-_ ]?20b", Experts(32, 4, 2880)),
    (r"qwen[-_ ]?3[-_ ]30b[-_ ]a3b", Experts(128, 8, 768)),
    (r"qwen[-_ ]?3[-_ ]235b[-_ ]a22b", Experts(128, 8, 1536)),
    (r"deepseek[-_ ]?v3(?!\.)|deepseek[-_ ]?r1", Experts(256, 8, 2048, 1)),
    (r"kimi[-_ ]?k2", Experts(384, 8, 2048, 1)),
    (r"mixtral[-_ ]?8x7b", Experts(8, 2, 14336)),
    (r"mixtral[-_ ]?8x22b", Experts(8, 2, 16384)),
    (r"grok[-_ ]?1", Experts(8, 2, 32768)),
    (r"\bdbrx\b", Experts(16, 4, 10752)),
    (r"llama[-_ ]?4[-_ ]?scout", Experts(16, 1, 8192, 1)),
)
_HEAD_WIDTHS: tuple[tuple[str, float], ...] = (
    (r"qwen[-_ ]?3", 128), (r"gpt[-_ ]?oss", 64), (r"gemma(?!.*(27|31)b)", 256),
)  # fmt: skip
"""Head dimension of models whose heads do not add up to the hidden size."""
_LATENT = re.compile(r"deepseek[-_ ]?(v[23]|r1)|kimi[-_ ]?k2", re.IGNORECASE)
LATENT_SCORES = 160.0
"""Mean head dimension of multi-head latent attention: scores of 192 and values of 128 numbers per
head, so 160 on average (DeepSeek-V3, arXiv:2412.19437). Its GEMMs have about as many weights as
those of h / a."""


def is_gated(model: str, width: float = 4.0, statement: str = "", by_size: float = 0.0) -> bool:
    """Return True if an ffn has a gate, by statement, family, parameters or width.

    `width` is the ffn's divided by the hidden size, `by_size` the result of `gate_by_size`. If
    nothing else decides, a width that is not a multiple of the hidden size means a gate.
    """
    if re.search(
        r"\b(non-?gated|ungated|not gated|plain|squared relu|gelu)\b", statement, re.IGNORECASE
    ):
        return False
    if re.search(r"\b(gated|swiglu|geglu)\b", statement, re.IGNORECASE) or GATED.search(model):
        return True
    if PLAIN.search(model):
        return False
    return by_size > 0 if by_size else width != round(width)


def gate_by_size(model: str, without: float, gate: float) -> float:
    """Return 1 if the parameters in a name fit a gated ffn, -1 without a gate, 0 if unclear.

    `without` are the parameters of the model without a gate, `gate` those of a gate.
    """
    match = _BILLIONS.search(model)
    if not match:
        return 0.0
    number = float(match[1]) * (1e12 if match[2].lower() == "t" else 1e9)
    plain, with_gate = abs(log(without / number)), abs(log((without + gate) / number))
    return 0.0 if abs(plain - with_gate) < _CLEAR else (1.0 if with_gate < plain else -1.0)


def experts_of(model: str) -> Experts | None:
    """Return the experts of a known family, None for others."""
    return next((e for text, e in _EXPERTS if re.search(text, model, re.IGNORECASE)), None)


def head_width(model: str) -> float | None:
    """Return the head dimension, None if heads add up to the hidden size."""
    return next((w for text, w in _HEAD_WIDTHS if re.search(text, model, re.IGNORECASE)), None)


def score_width(model: str) -> float:
    """Return the head dimension in attention's GEMMs, 0 if it is that of the model."""
    return LATENT_SCORES if _LATENT.search(model) else 0.0


class RecomputeFields(TypedDict, total=False):
    """Fields of a case."""

    full_recompute: float
    ffn_recompute: float
    activation_recompute: float
    norm_recompute: float
    latent_recompute: float
    selective_recompute: bool


def recompute_fields(row: Mapping[str, str], case: Case, memory: float | None) -> RecomputeFields:
    """Return the recomputation by the column `recompute`, for the row's `case` without it.

    `memory` is the device's memory in bytes. "selective" means attention, or the modules that it
    lists. A custom policy of MaxText recomputes everything that it does not save: recipes of the
    Ironwood TPU save only a block's input if it has experts, else also attention's inputs or
    outputs, never the ffn's first GEMMs (AI-Hypercomputer/tpu-recipes, training/ironwood). If
    nothing is stated and all activations do not fit into memory, everything is recomputed.
    """
    word = row.get("recompute", "").strip().lower()
    if word.startswith(("full", "remat full", "activation checkpointing", "recompute_all")):
        return {"full_recompute": 1.0}
    if word.startswith("remat custom"):
        return {"full_recompute": 1.0} if case.experts > 1 else {"ffn_recompute": 1.0}
    if word.startswith("sel"):
        modules = word.partition(":")[2]
        return {
            "selective_recompute": not modules or "core_attn" in modules,
            "activation_recompute": float("moe_act" in modules),
            "norm_recompute": float("layernorm" in modules),
            "latent_recompute": float("mla_up_proj" in modules),
        }
    if not word and memory and saved_bytes(case) > memory:
        return {"full_recompute": 1.0}
    return {}


def saved_bytes(case: Case) -> float:
    """Return the activation bytes of one rank without recomputation, in 16 bit.

    Korthikanti et al., arXiv:2205.05198, equations 1 to 4, in bytes per layer and micro-batch: T h
    (10 + 24/t), T h 34/t with sequence parallelism, and 5 a s T / t of scores if they are stored,
    with T tokens, h hidden size, a heads, s tokens of a sample, t tensor ranks. A pipeline's first
    rank keeps min(p, m) micro-batches.
    """
    tokens = case.micro_batch * case.seq_len / case.cp
    replicas = max(1.0, case.devices / prod(getattr(case, axis) for axis in MODEL_AXES))
    in_flight = min(case.pp, max(1.0, case.global_batch / (replicas * case.micro_batch)))
    stream = 34 / case.tp if case.sequence_parallel else 10 + 24 / case.tp
    scores = 0.0 if case.flash else 5 * case.heads * case.seq_len * tokens / case.tp
    return case.layers / case.pp * in_flight * (tokens * case.hidden * stream + scores)


_CHAT = re.compile(r"deepspeed-chat", re.IGNORECASE)
_ADAPTED = re.compile(r"\bopt-13b\b", re.IGNORECASE)
CHAT_RANK = 128
"""Rank of the adapters on all matrices of OPT-13B's blocks; embeddings, norms and biases are
trained as well (--lora_dim 128 --lora_module_name decoder.layers. in Lambda's logs of
DeepSpeed-Chat)."""


def has_adapters(row: Mapping[str, str]) -> bool:
    """Return True if the script of a row trains adapters although the row does not state it."""
    chat = _CHAT.search(row.get("source", ""))
    return bool(chat and _ADAPTED.search(row.get("model", "")))


def matrix_widths(case: Case) -> float:
    """Return the sum of inputs and outputs of all matrices of a block."""
    heads, kv = case.heads * case.head_dim, case.kv_heads * case.head_dim
    return 2 * (2 * case.hidden + heads + kv) + (2 + case.gated) * (case.hidden + case.ffn)


def with_chat_adapters(case: Case) -> Case:
    """Return a case with the adapters of DeepSpeed-Chat's script for OPT-13B."""
    widths = matrix_widths(case)
    x = cases_of([case])
    tables, blocks = float(table_weights(x)[0]), case.layers * float(block_weights(x)[0])
    trained_parameters = case.layers * CHAT_RANK * widths + tables
    return replace(
        case,
        adapter_rank=CHAT_RANK,
        adapter_widths=widths,
        trained_share=trained_parameters / (blocks + tables),
    )


_DISPATCHERS: tuple[tuple[Dispatcher, str], ...] = (
    ("hybridep", r"hybrid-?ep"),
    ("deepep", r"deep-?ep"),
    ("alltoall", r"(dispatcher|^)\W*(nccl\W*)?all-?to-?all"),
)
_OVERLAP = re.compile(r"overlap_moe_expert_parallel_comm\s*=\s*(\w+)", re.IGNORECASE)
_FORCED = re.compile(r"\b(forced?|fake)\b[^;]*\b(balanc\w*|gate)", re.IGNORECASE)
_GROUPS = ((r"deepseek[-_ ]?(v3(?!\.)|r1)", (8.0, 4.0)),)
"""Groups of experts and groups per token, of models with group-limited routing (config.json)."""
_DROPPED = re.compile(r"token-?\s?drop", re.IGNORECASE)
YES, NO = ("1", "1.0", "true", "yes", "on"), ("0", "0.0", "false", "no", "off")


class ExpertFields(OwnKernels, total=False):
    """Fields of a case."""

    dispatcher: Dispatcher
    expert_groups: float
    groups_per_token: float
    whole_experts: bool
    drops_tokens: bool
    cuda_graphs: CudaGraphs


def expert_fields(row: Mapping[str, str], case: Case, software: str, dtype: Dtype) -> ExpertFields:
    """Return the details of a row with experts; `case` is the row without them.

    Columns `moe_dispatcher`, `ep_overlap` (on, off), `etp`, `token_drop` and `cuda_graphs` (1, 0)
    count before the notes and the model's name. Tensor ranks hold unsharded experts if `etp` is 1
    or the software's recipes do so. A step is one CUDA graph if its release does that. Routing is
    limited to groups as in the model, except where the notes state a forced balance.
    """
    notes, model = row.get("notes", ""), row.get("model", "")
    drops, graph = flag(row, "token_drop"), flag(row, "cuda_graphs")
    default = expert_cuda_graphs(software, case.software_date, case.generation, case.domain, dtype)
    graphs = default if graph is None else "iteration" if graph else "none"
    etp = re.search(r"\bETP\s*=?\s*(\d+)", (row.get("etp") and f"ETP{row['etp']}") or notes)
    kernels = own_kernels(software, case.software_date, dtype)
    overlap_default = kernels.get("ep_overlap") or ("on" if graphs == "iteration" else "any")
    groups = next((sizes for name, sizes in _GROUPS if re.search(name, model, re.IGNORECASE)), None)
    groups = (1, 1) if groups is None or _FORCED.search(notes) else groups
    return {
        **kernels,
        "dispatcher": _dispatcher(row.get("moe_dispatcher") or notes),
        "ep_overlap": _overlap(row, notes, overlap_default),
        "expert_groups": groups[0],
        "groups_per_token": groups[1],
        "whole_experts": int(etp[1]) == 1 if etp else software in WHOLE_EXPERTS,
        "drops_tokens": bool(_DROPPED.search(model)) if drops is None else drops,
        "cuda_graphs": graphs,
    }


class DenseBlocks(TypedDict):
    """Fields of a case."""

    dense_share: float
    more_weights: float


def dense_block_fields(first: float, width: float | None, case: Case) -> DenseBlocks:
    """Return the fields for the `first` blocks of a case with experts, which have a dense ffn.

    `more_weights` is the mean over blocks of the parameters of that ffn minus those of router and
    shared experts, which count in every block. `width` is the ffn's; None means that of a token's
    experts together.
    """
    share = min(1.0, first / case.layers)
    width = width or case.ffn * case.experts_per_token + case.shared_ffn
    matrices = (2 + case.gated) * case.hidden * (width - case.shared_ffn)
    return DenseBlocks(
        dense_share=share, more_weights=share * (matrices - case.hidden * case.experts)
    )


def flag(row: Mapping[str, str], name: str) -> bool | None:
    """Return a yes/no column as a bool; None if it is neither."""
    word = (row.get(name) or "").strip().lower()
    return True if word in YES else False if word in NO else None


def _dispatcher(text: str) -> Dispatcher:
    for name, word in _DISPATCHERS:
        if re.search(word, text, re.IGNORECASE):
            return name
    return "any"


def _overlap(row: Mapping[str, str], notes: str, default: EpOverlap) -> EpOverlap:
    column, match = flag(row, "ep_overlap"), _OVERLAP.search(notes)
    if column is None and match:
        column = flag({"noted": match[1]}, "noted")
    return default if column is None else "on" if column else "off"
