"""Counts derived from a model and its layout: micro-batches, replicas, weights per rank.

Symbols: h hidden size, a d and g d widths of all queries and of all keys, w width of the ffn. A
block has h (a d + 2 g d) + a d h weights in attention, and 2 h w in its ffn, 3 h w with a gate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.layout import MODEL_AXES
from paceline.estimate.model.case import Cases, Floats


def stage_layers(x: Cases) -> tuple[Floats, Floats]:
    """Return the layers of the fullest rank except the last one, and of the last one.

    The last rank has the head. Chunks have equally many layers if that divides. Otherwise embedding
    and head count as layers of the first and last chunk if that divides. Otherwise the first chunks
    have one more layer (core/pipeline.py: stage_sizes).
    """
    chunks = np.maximum(x.pp * x.vp, 1.0)
    each, remainder = np.divmod(x.layers, chunks)
    most = each * x.vp + np.ceil(remainder / np.maximum(x.pp, 1))
    last = each * x.vp + np.floor(remainder / np.maximum(x.pp, 1))
    counts_ends = (remainder > 0) & ((x.layers + 2) % chunks == 0) & (x.pp > 1)
    whole = (x.layers + 2) / chunks * x.vp
    most = np.where(counts_ends, whole - (x.pp <= 2), most)
    return most, np.where(counts_ends, whole - 1, last)


def balanced_stage_layers(x: Cases, head_layers: Floats) -> tuple[Floats, Floats]:
    """Return the same if the last rank has fewer layers, so that its head delays others least.

    `head_layers` is the time of head and loss divided by that of a layer. Frameworks that train
    multi-token prediction place layers this way, because each such layer adds a pass through the
    head: Megatron-Bridge's recipes for DeepSeek V3 leave one of 61 layers on the last of 16 ranks.
    """
    others = np.maximum(x.pp - 1, 1)
    # One row per number of layers on the last rank, one column per case.
    last = np.arange(float(np.max(np.ceil(x.layers / x.pp))) + 1)[:, None] + np.zeros(x.size)
    most: Floats = np.ceil((x.layers - last) / others / x.vp) * x.vp
    slowest = np.where(last <= x.layers / x.pp, np.maximum(most, last + head_layers), np.inf)
    best = slowest.argmin(axis=0), np.arange(x.size)
    return most[best], last[best]


TENSORS, GATED_TENSORS = 16, 9
"""Tensors per block: six matrices and two norms with biases, or seven and two without."""


def num_microbatches(x: Cases) -> Floats:
    """Return the micro-batches per replica and step."""
    return np.maximum(1.0, x.global_batch / (replicas(x) * x.micro_batch))


def model_devices(x: Cases) -> Floats:
    """Return the devices per replica."""
    return np.prod([getattr(x, axis) for axis in MODEL_AXES], axis=0)


def replicas(x: Cases) -> Floats:
    """Return the number of data-parallel replicas."""
    return np.maximum(1.0, x.devices / model_devices(x))


def block_weights(x: Cases) -> Floats:
    """Return the parameters of one block's matrices, all experts included."""
    return common_weights(x) + ffn_weights(x)


def attention_weights(x: Cases) -> Floats:
    """Return the parameters of a block's attention."""
    heads, kv = x.heads * x.head_dim, x.kv_heads * x.head_dim
    return x.hidden * (heads + 2 * kv) + heads * x.hidden


def ffn_weights(x: Cases) -> Floats:
    """Return the parameters of a block's ffn, all experts together; the mean over blocks."""
    return (2 + x.gated) * x.hidden * x.ffn * x.experts * (1 - x.dense_share)


def common_weights(x: Cases) -> Floats:
    """Return a block's parameters without experts: attention, router, shared ffn."""
    router = np.where(x.experts > 1, x.hidden * x.experts, 0.0)
    return attention_weights(x) + router + (2 + x.gated) * x.hidden * x.shared_ffn


def copies(x: Cases) -> tuple[Floats, Floats]:
    """Return the ranks that replicate (attention's weights, an ffn's weights) before ZeRO.

    Expert parallelism spreads the experts over the data ranks, so fewer ranks replicate an ffn.
    """
    ranks = replicas(x) * x.cp
    return ranks, np.maximum(1.0, ranks * _tensor_ranks_as_expert_ranks(x) / expert_ranks(x))


def shards(x: Cases) -> tuple[Floats, Floats]:
    """Return the ranks over which ZeRO shards one copy of (a block's attention, an ffn).

    These are all ranks that replicate it, or those of one hybrid shard (HSDP) under ZeRO-2 and 3.
    """
    ranks, _ = copies(x)
    hybrid = (x.dp_shard > 0) & (x.zero_stage >= 2)
    ranks = np.where(hybrid, np.minimum(x.dp_shard, ranks), ranks)
    return ranks, np.maximum(1.0, ranks * _tensor_ranks_as_expert_ranks(x) / expert_ranks(x))


def expert_shards(x: Cases) -> Floats:
    """Return the tensor ranks that shard each matrix of an ffn: all, or 1 for unsharded experts."""
    return np.where((x.experts > 1) & (x.whole_experts > 0), 1.0, x.tp)


def _tensor_ranks_as_expert_ranks(x: Cases) -> Floats:
    """Return the number of tensor ranks that count as expert ranks."""
    return x.tp / expert_shards(x)


def expert_ranks(x: Cases) -> Floats:
    """Return the ranks that share a block's experts."""
    return np.where(x.experts > 1, x.ep, 1.0)


def exchanges_in_blocks(x: Cases) -> NDArray[np.bool_]:
    """Return True if ZeRO-2 or 3 exchanges in every block and micro-batch.

    Pipelines of Megatron's kind gather weights once per step and keep gradients until the last
    micro-batch. With many micro-batches in flight, all weights would otherwise soon be needed again
    (Llama 3, arXiv:2407.21783, 3.3.2; MegaScale, arXiv:2402.15627, 3.2).
    """
    keeps_gradients = (x.pp > 1) & ~x.is_category("implementation", "torch")
    return (x.zero_stage >= 2) & ~keeps_gradients


def rank_weights(x: Cases) -> tuple[Floats, Floats]:
    """Return the parameters on one rank of the first stage before ZeRO: (without ffns, of ffns)."""
    most, _ = stage_layers(x)
    non_ffn = (common_weights(x) + x.more_weights) / x.tp
    ffns = ffn_weights(x) / expert_shards(x) / expert_ranks(x)
    return most * non_ffn + table_weights(x), most * ffns


def trained_tensors(layers: float, gated: bool, adapted_matrices: float = 0) -> float:
    """Return the trained tensors of all blocks: matrices and norms, with biases if ungated.

    Each of the `adapted` matrices of a block has two tensors of an adapter in its place.
    """
    return layers * ((GATED_TENSORS if gated else TENSORS) + adapted_matrices)


def sequentially_updated_tensors(x: Cases) -> Floats:
    """Return the trained tensors that the optimizer updates one after the other."""
    return np.where(x.zero_stage == 0, x.param_tensors, 0.0)


def table_weights(x: Cases) -> Floats:
    """Return the parameters of embedding and head per rank; ungated models tie the two."""
    return x.vocab * x.hidden / x.tp * np.where(x.pp > 1, 1.0, 1.0 + x.gated)
