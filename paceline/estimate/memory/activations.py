"""Activations and logits on one rank of a pipeline stage, as arrays over many cases.

Symbols: t tokens of a micro-batch on a rank, h hidden size, a d and g d widths of all queries and
of all keys, w width of the ffn, s tokens of a sample, c bytes of a number, tp tensor ranks. All
results are bytes. Functions take x, the cases; f, their framework's constants (framework.py); and
s, the rank's stage (states.py).

    block       t (c (4 h + (2 a d + 2 g d + n w) / tp) + the framework's own), n = 2, or 3 gated
    scores      5 a s t / tp in 16 bit with dropout, where attention stores them
    recomputed  t c h of a block's input instead of all that
    logits      the framework's bytes (4 to 15) t vocabulary / tp, of each token that is predicted

After Korthikanti et al., arXiv:2205.05198, section 4. core/memory.py counts the minimum; this
module counts what frameworks actually save.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.estimate.memory.framework import EVERYTHING, Constants
from paceline.estimate.memory.states import (
    NORMS,
    Stage,
    has_persistent_copies,
    shards_weights,
    value_of_last_block,
    vocabulary_rows,
)
from paceline.estimate.model.block import active_experts, tokens
from paceline.estimate.model.case import Bools, Cases, Floats
from paceline.estimate.model.weights import num_microbatches, replicas

DROPOUT_TENSORS = 2
"""Number of residual-stream tensors with dropout per block: attention's and the ffn's outputs."""
LSE_BYTES = 4
"""Bytes of the fp32 log-sum-exp of a row, all that flash attention saves of its scores: one for
each head and token (Dao et al., arXiv:2205.14135)."""


@dataclass(frozen=True)
class Activations:
    """Bytes of activations in a step's passes, on one rank."""

    saved_bytes: Floats
    """Bytes saved for backward passes that have not started."""
    working: Floats
    """Additional bytes of the one block whose backward pass is running."""
    logits: Floats
    """Bytes of the head: inputs, logits and loss."""
    num_logits: Floats
    """Number of logits of one micro-batch (a count, not bytes)."""
    waiting: Floats
    """Part of `logits` of the other micro-batches after gpipe's first backward pass."""


def activations(x: Cases, f: Constants, s: Stage) -> Activations:
    """Return activations and logits of a rank.

    With full activation checkpointing only a block's input is saved, and one block is recomputed at
    a time during the backward pass. Selective checkpointing omits the scores. With a memory budget,
    blocks save different parts. The last block saves the most and is the first to be recomputed.
    """
    t, c = tokens(x), x.compute_bytes
    # Ranks that shard the tensors of h features: only sequence parallelism splits these.
    shared = np.where(x.sequence_parallel > 0, x.tp, 1.0)
    per_token, row_sums = _block_per_token(x, f, s, shared), LSE_BYTES * x.heads / x.tp
    whole = t * (per_token + np.where(_stores_scores(x, f), _scores(x, f), row_sums))
    gemm_outputs = f.activation_scale * c * _every_second_gemm(x, shared)
    selective = t * (np.where(f.saves_every_second_gemm > 0, gemm_outputs, per_token) + row_sums)
    inputs = t * c * x.hidden / shared
    savings, recompute_peak = _recompute_bytes(x, f, shared, whole, inputs)
    # Selective checkpointing replaces the block's bytes only without full recomputation. `less` is
    # then subtracted for the shares of blocks that are recomputed at each level.
    is_selective_only = (x.selective_recompute > 0) & (x.full_recompute == 0)
    block = np.where(is_selective_only, selective, whole) - savings
    gradients = f.backward * t * c * (x.hidden / shared + x.ffn / x.tp)
    logits, waiting = _logits(x, f, s, shared)
    head = s.last & (x.vocab > 0)
    return Activations(
        saved_bytes=s.alive * block
        + _deferred_gradients(x, s)
        + _transfers(x, f, s, inputs)
        + np.where(s.first, f.embedding_kept * t * x.hidden * _in_flight(s), 0.0),
        working=np.where(s.layers > 0, recompute_peak + gradients, 0.0),
        logits=np.where(head, logits, 0.0),
        num_logits=np.where(head, t * vocabulary_rows(x, f) / x.tp, 0.0),
        waiting=np.where(head, waiting, 0.0),
    )


def _recompute_bytes(
    x: Cases, f: Constants, shared: Floats, whole: Floats, inputs: Floats
) -> tuple[Floats, Floats]:
    """Return (bytes saved by recomputation per block on average, bytes recomputed at the peak).

    A recomputed ffn saves neither its tensors nor the output of its norm, gathered or not. A
    recomputed activation omits only its own output; the outputs of the first GEMMs stay.
    """
    t, c = tokens(x), x.compute_bytes
    ffn = t * c * f.activation_scale * (x.ffn * active_experts(x) + x.shared_ffn) / x.tp
    first, second = _ffn_tensors(x, f)
    of_activation = ffn * second
    of_norm = np.where(f.gathers_inputs > 0, 1.0, 1 / shared) * _norm_outputs(x, f) / NORMS
    of_ffn = ffn * (first + second) + t * c * x.hidden * of_norm
    savings = (
        x.full_recompute * (whole - inputs)
        + x.ffn_recompute * of_ffn
        + x.activation_recompute * of_activation
    )
    nothing = np.zeros(x.size)
    at_last = value_of_last_block(x, full=whole, ffn=of_ffn, activation=of_activation, none=nothing)
    return savings, at_last


def _deferred_gradients(x: Cases, s: Stage) -> Floats:
    """Return the bytes of GEMM output gradients that zero-bubble keeps for weight gradients.

    Outputs of a block's GEMMs: queries, keys and values, the ffn's first GEMM (with its gate), and
    twice h for the last GEMMs of attention and ffn.
    """
    widths = (x.heads + 2 * x.kv_heads) * x.head_dim + (1 + x.gated) * x.ffn
    of_layer = tokens(x) * x.compute_bytes * (2 * x.hidden + widths / x.tp)
    # The current micro-batch's gradients add to those of the deferred ones.
    return np.where(
        s.deferred_microbatches > 0, (s.deferred_microbatches + 1) * s.layers * of_layer, 0.0
    )


def _transfers(x: Cases, f: Constants, s: Stage, inputs: Floats) -> Floats:
    """Return the bytes of sent stage outputs that stay allocated for micro-batches in flight."""
    ranks = np.where(f.splits_transfers > 0, x.tp, 1.0)
    num_outputs = x.vp * _in_flight(s) / ranks
    return np.where(x.pp > 1, f.keeps_transfers * num_outputs * inputs, 0.0)


def _in_flight(s: Stage) -> Floats:
    """Return the mean number of micro-batches whose activations of a rank's layers are alive."""
    return s.layers_in_flight / np.maximum(s.layers, 1)


def _context_parallel_features(x: Cases, f: Constants) -> Floats:
    """Return the features per token that context parallelism saves in addition to its own tensors.

    These are attention's output again, joined from parts, and the other ranks' keys and values
    where they are all-gathered.
    """
    gathers = x.is_category("cp_exchange", "all-gather") | x.is_category("cp_exchange", "any")
    keys = np.where(gathers, 2 * (x.cp - 1) * x.kv_heads, 0.0)
    return np.where(x.cp > 1, f.joins_parts * (x.heads + keys) * x.head_dim, 0.0)


def _ffn_tensors(x: Cases, f: Constants) -> tuple[Floats, Floats]:
    """Return the number of saved tensors of the ffn's width: (of first GEMMs, of the activation).

    A gate also saves its activation's output unless a fused kernel joins the two. A ReLU needs only
    its output, or, compiled for a GPU, one byte per number that marks where it is 0. A frozen last
    GEMM saves no input.
    """
    # `first`: a ReLU without a gate saves its sign as a byte if compiled for a GPU, or its output
    # if the last GEMM is frozen (otherwise that output is counted as the last GEMM's input). All
    # other activations save the first GEMM's output, and the gate's.
    is_trained, plain = np.where(x.frozen > 0, 0.0, 1.0), 1 - x.gated
    bytewise = (x.compiled > 0) & ~_compiled_for_a_cpu(x)
    signs = np.where(bytewise, 1 / x.compute_bytes, 1 - is_trained)
    relu = plain * x.relu
    first = np.where(relu > 0, signs, 1 + x.gated)
    second = is_trained + x.gated * f.ffn_gated * (1 - x.compiled)
    return first, second * (1 - x.gate_recompute)


def _norm_outputs(x: Cases, f: Constants) -> Floats:
    """Return the number of saved norm outputs of a block: none before frozen GEMMs."""
    recomputed_share = f.drops_norms * (x.compiled > 0) * (x.peak_narrow > 0)
    kept_share = (1 - recomputed_share) * (1 - x.norm_recompute)
    return np.where(x.frozen > 0, 0.0, NORMS * kept_share)


def _every_second_gemm(x: Cases, shared: Floats) -> Floats:
    """Return the numbers per token that selective checkpointing by operation saves.

    These are a block's input, attention's output, and the outputs of GEMMs 1, 3, 5 and 7 of
    queries, keys, values, output, gate (or the only first GEMM), up and down: queries, values, the
    gate and, if there is one, down. Source: pytorch/torchtitan, the policy of `selective_ac_option
    = "op"`. The output of down is saved before tensor ranks reduce it, so it is not sharded.
    """
    queries, values = x.heads * x.head_dim, x.kv_heads * x.head_dim
    width = x.ffn * active_experts(x) + x.shared_ffn
    whole = x.hidden / shared + x.gated * x.hidden
    return whole + (2 * queries + values + width) / x.tp


def _adapters(x: Cases, f: Constants, shared: Floats) -> Floats:
    """Return the bytes per token that adapters save: inputs, and one byte per dropout element.

    A tensor rank has the full input of column-parallel GEMMs unless, under sequence parallelism, it
    saves only its part of the tokens. Compiled for a CPU, dropout saves no mask.
    """
    masks = np.where(_compiled_for_a_cpu(x), 0.0, x.adapter_drops)
    whole = x.adapter_inputs * np.where(f.gathers_inputs > 0, 1.0, 1 / shared)
    inputs = (x.compute_bytes + masks) * (whole + x.adapter_parts / x.tp)
    return np.where(x.frozen > 0, inputs + x.compute_bytes * x.adapter_inner, 0.0)


def _block_per_token(x: Cases, f: Constants, s: Stage, shared: Floats) -> Floats:
    """Return the bytes per token that a block saves, without attention scores.

    c (4 h + (2 a d + 2 g d + n w) / tp), with n = 3 with a gate and 2 without (core/memory.py),
    plus the framework's own: dropout masks, norms in fp32, gathered inputs, the ffn's unfused gate.
    With experts, w is the width of all experts of a token, plus 2 h for each of them where tokens
    are sorted by expert and back, in blocks that have experts. Inputs of narrow GEMMs may be saved
    in their dtype. Latent attention also saves its narrow vectors. Sequence parallelism shards the
    residual stream's tensors as well.
    """
    c = x.compute_bytes
    inputs = np.where(f.gathers_inputs > 0, 2 * c * (1 - 1 / shared), 0.0)
    masks = np.where(x.drops_stream > 0, _stream_masks(x, f), f.masks)
    outputs = _norm_outputs(x, f)
    of_norms = (NORMS + outputs) * c + NORMS * _norm(x, f)
    stream = ((of_norms + masks) / shared + inputs * outputs / NORMS) * x.hidden
    experts = active_experts(x)
    width = sum(_ffn_tensors(x, f)) * (x.ffn * experts + x.shared_ffn)
    # Experts' inputs in the dtype of their GEMMs, and their outputs in the compute dtype. Kernels
    # that recompute the activation apply the router's weights in it and need no outputs.
    sorted_in = np.where(x.experts > 1, experts * x.hidden * (1 - s.dense_share(x)), 0.0)
    sorted_out = sorted_in * (1 - x.gate_recompute)
    width_of_head = np.where(x.score_width > 0, x.score_width, x.head_dim)
    # Queries, keys, values and attention's output.
    up_projections = (x.heads + 2 * x.kv_heads) * width_of_head * (1 - x.latent_recompute)
    heads = up_projections + x.heads * width_of_head + x.latents + _context_parallel_features(x, f)
    narrow = np.where(x.saved_bytes > 0, x.saved_bytes, c)
    of_parts = (c * (heads + sorted_out) + narrow * (width + sorted_in)) / x.tp
    return f.activation_scale * (stream + of_parts + _adapters(x, f, shared))


def _compiled_for_a_cpu(x: Cases) -> Bools:
    """Return a mask of the cases compiled for a CPU.

    There, dropout saves two seeds instead of a mask, and a ReLU only its output.
    """
    return (x.compiled > 0) & x.is_category("generation", "cpu")


def _stream_masks(x: Cases, f: Constants) -> Floats:
    """Return the dropout bytes per token and feature of a block's residual stream.

    Only the native trainer uses this. If tensor ranks draw separately, each for its part of the
    tokens, dropout is not compiled.
    """
    draws_separately = (x.sequence_parallel > 0) & (x.tp > 1)
    mask = np.where(f.noise > 0, x.compute_bytes, 1.0)
    return np.where(_compiled_for_a_cpu(x) & ~draws_separately, 0.0, DROPOUT_TENSORS * mask)


def _stores_scores(x: Cases, f: Constants) -> Bools:
    """Return True where attention stores its scores: without flash attention, or if they are small.

    A CPU has no kernel that applies dropout to probabilities without storing them.
    """
    return (
        (x.flash == 0)
        | (f.noise * x.drops_scores > 0)
        | (x.seq_len**2 / x.cp <= f.scores_within**2)
    )


def _scores(x: Cases, f: Constants) -> Floats:
    """Return the bytes of a token's scores.

    5 a s / tp in 16 bit with dropout, computed as c / 2 x scores a s / tp. With dropout on CPUs,
    probabilities, mask and result are fp32, as are then queries, keys and values: 3 x 4 a (s + d) /
    tp.
    """
    dropout_bytes = (
        3 * 4 * x.heads * (x.seq_len + np.where(x.compute_bytes < 4, x.head_dim, 0)) / x.tp
    )
    score_bytes = f.scores * x.compute_bytes / 2 * x.heads * x.seq_len / x.tp
    return f.activation_scale * np.where(f.noise * x.drops_scores > 0, dropout_bytes, score_bytes)


def _norm(x: Cases, f: Constants) -> Floats:
    """Return the bytes per token and feature that a norm saves beyond its input and output.

    Models with a gated ffn have RMSNorm, others LayerNorm.
    """
    c = x.compute_bytes
    wide = np.where(f.wide_norm > 0, 4 * f.wide_norm - c, 0.0)
    return np.where(x.gated > 0, wide, np.where(c < 4, c * f.narrow_norm, 0.0))


def all_forward_first(x: Cases) -> Bools:
    """Return a mask of the cases that run all forward passes before any backward pass (gpipe)."""
    return (x.pp > 1) & x.is_category("schedule", "gpipe")


def _logits(x: Cases, f: Constants, s: Stage, shared: Floats) -> tuple[Floats, Floats]:
    """Return the bytes of (head input, logits and loss; the part of waiting micro-batches).

    gpipe keeps a whole step's; the second value belongs to the micro-batches that wait after its
    first backward pass. A loss that goes through chunks of tokens holds the logits of one chunk.
    Each predicted token has its own loss, whose logits are kept until the backward pass.
    """
    t, rows = (1 + x.mtp_layers) * tokens(x), vocabulary_rows(x, f) / x.tp
    input_bytes = t * x.hidden * (2 * x.compute_bytes + _norm(x, f)) / shared
    head = np.where(f.head_gradient > 0, rows * x.hidden, 0.0)
    # Micro-batches whose head tensors are alive: all of a step in gpipe, else the current one plus
    # those that zero-bubble defers. A chunked loss holds one chunk of logits whatever that number
    # is; an unchunked one holds the logits of every such micro-batch.
    waiting = np.where(all_forward_first(x), num_microbatches(x), 1 + s.deferred_microbatches)
    logits = (f.logits + x.more_logit_bytes) * t * rows
    is_chunked = f.chunk < EVERYTHING
    at_once = np.where(is_chunked, _chunk(x, f, t, rows), waiting * logits)
    # Each of these micro-batches keeps a head gradient. Only the current one needs the 16-bit copy
    # of the head that computes it.
    copy = np.where((x.frozen > 0) | (x.compute_bytes >= f.weight), 0.0, x.compute_bytes * head)
    is_gathered = shards_weights(x, f) & (replicas(x) * x.cp > 1)
    gradient = np.where((x.frozen > 0) & (x.trains_head == 0), 0.0, f.head_gradient * head)
    head_bytes = waiting * gradient + np.where(is_gathered, 0.0, copy)
    each = input_bytes + gradient + np.where(is_chunked, 0.0, logits)
    others = np.where(all_forward_first(x), waiting - 1, 0.0) * each
    return at_once + waiting * input_bytes + np.where(
        has_persistent_copies(x, f), copy, head_bytes
    ), others


def _chunk(x: Cases, f: Constants, t: Floats, rows: Floats) -> Floats:
    """Return the bytes of the logits of one chunk of tokens; chunks are as even as possible.

    Per logit of c bytes: the logit itself, which its gradient overwrites; the gradient of the
    previous chunk; an fp32 working copy; and, for an unsharded vocabulary, another one that the
    softmax reads (PyTorch's reads fp16 directly, not bf16). Compiled, there is no fp32 copy, but a
    gradient of its own.
    """
    c = x.compute_bytes
    at_once = np.maximum(1, np.floor(f.chunk / (4 * np.maximum(1, rows))))
    chunks = np.ceil(t / at_once)
    before = np.where(chunks > 1, 1.0, 0.0)
    read = np.where(x.half * (f.noise == 0) > 0, 0.0, 4.0)
    # Bytes per logit of an unsharded vocabulary: compiled 2 c (logit and gradient), 16 bit c + 4
    # plus what softmax reads, fp32 8. With a sharded vocabulary (next line) there is no copy for
    # softmax: c + 4 in 16 bit, 4 in fp32.
    whole = np.where(x.compiled > 0, 2 * c, np.where(c < 4, c + 4 + read, 8.0))
    of_logit = np.where(x.tp <= 1, whole, np.where(c < 4, c + 4, 4.0)) + before * c
    return of_logit * np.ceil(t / chunks) * rows
