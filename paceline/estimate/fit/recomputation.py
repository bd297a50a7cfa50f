"""What a published row computes again in its backward pass, as it states or as its memory tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from paceline.estimate.model.case import Case


class Recomputed(TypedDict, total=False):
    """Fields of a case."""

    full_recompute: float
    ffn_recompute: float
    activation_recompute: float
    selective_recompute: bool


def recomputed(row: Mapping[str, str], case: Case, memory: float | None) -> Recomputed:
    """By the column `recompute`; `case` is the row without it, `memory` a device's bytes.

    "selective" is attention, or the modules that it names. A custom policy of MaxText computes all
    again that it does not keep: recipes of the Ironwood TPU keep a block's input alone where it has
    experts, else also what attention takes or gives, never the ffn's first products
    (AI-Hypercomputer/tpu-recipes, training/ironwood). Where nothing is stated and all
    activations do not fit into memory everything is computed again.
    """
    word = row.get("recompute", "").strip().lower()
    if word.startswith(("full", "remat full")):
        return {"full_recompute": 1.0}
    if word.startswith("remat custom"):
        return {"full_recompute": 1.0} if case.experts > 1 else {"ffn_recompute": 1.0}
    if word.startswith("sel"):
        named = word.partition(":")[2]
        attention, activation = not named or "core_attn" in named, "moe_act" in named
        return {"selective_recompute": attention, "activation_recompute": float(activation)}
    if not word and memory and saved_bytes(case) > memory:
        return {"full_recompute": 1.0}
    return {}


def saved_bytes(case: Case) -> float:
    """Activations of one rank without recomputation, in 16 bit, with scores where they are kept.

    Korthikanti et al., arXiv:2205.05198, equations 1 to 4, in bytes a layer and micro-batch:
    T h (10 + 24/t), T h 34/t with sequence parallelism, and 5 a s T / t of scores, with T tokens, h
    hidden size, a heads, s tokens of a sample, t tensor ranks. A pipeline's first rank keeps
    min(p, m) micro-batches.
    """
    tokens = case.micro_batch * case.seq_len / case.cp
    replicas = max(1.0, case.devices / (case.tp * case.pp * case.cp))
    in_flight = min(case.pp, max(1.0, case.global_batch / (replicas * case.micro_batch)))
    stream = 34 / case.tp if case.sequence_parallel else 10 + 24 / case.tp
    scores = 0.0 if case.flash else 5 * case.heads * case.seq_len * tokens / case.tp
    return case.layers / case.pp * in_flight * (tokens * case.hidden * stream + scores)
