"""Time of one transformer block for one micro-batch on one rank, by part.

Symbols, one value a case: t tokens of a micro-batch on a rank, h hidden, a d and g d widths of
queries and of keys, s tokens of a sample. tp divides sizes of products, cp divides tokens.

    product      2 m n k / rate + start + part of its memory traffic: FLOP / (FLOP/s) = s
    attention    4 s t a d / tp FLOP of both its products, half of it under a causal mask
    elementwise  2 bytes x widths x t / memory rate, norms, activations, residuals
    exchange     bytes / rate of the group + start, collectives.py

Rates are those of the data sheet times a coefficient (coefficients.py), which measured steps move.
FLOPs of a block: Narayanan et al., arXiv:2104.04473; flash attention's backward pass of 2.5 forward
ones: Dao, arXiv:2307.08691; selective recomputation: Korthikanti et al., arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.estimate.model.case import Bools, Cases, Floats
from paceline.estimate.model.collectives import (
    all_reduce_s,
    all_to_all_s,
    group_rate,
    start_s,
)
from paceline.estimate.model.experts import (
    exchange_s,
    fused,
    grouped_rate,
    host_s,
    local_experts,
    routed,
    software_age_factor,
    tokens_of_each,
    traffic,
)
from paceline.estimate.model.weights import expert_shards
from paceline.files import catalog

BYTES = 2


def context_s(x: Cases, c: Mapping[str, float], tokens: Floats, attention: Floats) -> Floats:
    """Seconds of a block's forward and backward pass that its exchanges add.

    `tokens` is t, `attention` the seconds of its forward pass.
    """
    seconds = _passed_on(x, c, tokens, attention)
    for exchange, of in (("all-gather", _gathered), ("all-to-all", _swapped)):
        rows = x.has("cp_exchange", exchange)
        if rows.any():
            seconds = np.where(rows, of(x, c, tokens), seconds)
    return np.where(x.cp > 1, seconds, 0.0)


def _passed_on(x: Cases, c: Mapping[str, float], tokens: Floats, attention: Floats) -> Floats:
    """Around a ring, also where nobody says: attention hides all but `cp_exposed` of it.

    2 tensors of t g d / tp numbers of each of cp - 1 ranks; as much twice again backward.
    """
    moved = (x.cp - 1) * 2 * BYTES * tokens * x.kv_heads * x.head_dim / x.tp
    span = x.tp * x.cp
    needed = moved / group_rate(x, c, span, x.tp) + start_s(x, c, span) * (x.cp - 1)
    hidden = np.minimum(needed, attention)
    return (needed - hidden + c["cp_exposed"] * hidden) * (3 + x.full_recompute)


def _gathered(x: Cases, c: Mapping[str, float], tokens: Floats) -> Floats:
    """All keys and values before attention begins, their gradients summed and scattered after it.

    A gather and a scatter are an all-reduce of the gathered bytes; attention waits for both.
    """
    whole = x.cp * 2 * BYTES * tokens * x.kv_heads * x.head_dim / x.tp
    both = all_reduce_s(x, c, whole, x.cp, x.tp, 2.0)
    again = np.maximum(x.full_recompute, x.selective_recompute)
    return both * (1 + again / 2)


def _swapped(x: Cases, c: Mapping[str, float], tokens: Floats) -> Floats:
    """Queries, keys and values for a share of the heads and all tokens, and the output back.

    Key/value heads are copied until the ranks can share them (lcm); nothing hides the exchanges
    (Jacobs et al., arXiv:2309.14509).
    """
    kv_heads = np.maximum(1, x.kv_heads // x.tp).astype(np.int64)
    shared = np.lcm(kv_heads, x.cp.astype(np.int64)) * x.tp
    head, alone = BYTES * tokens * x.head_dim / x.tp, np.ones(x.size)

    def swap_s(heads: Floats) -> Floats:
        return all_to_all_s(x, c, head * heads, x.cp, x.tp, alone)

    to_tokens, to_heads = swap_s(x.heads + 2 * shared), swap_s(x.heads)
    again = np.maximum(x.full_recompute, x.selective_recompute)
    return to_tokens * (2 + again) + to_heads * (2 + x.full_recompute)


GENERATIONS = catalog.generations()
"""What generations.yaml of the catalog declares of each."""
IMPLEMENTATIONS = ("softmax", "fused", "torch")
RELEASE_YEAR = {name: each.release_year for name, each in GENERATIONS.items()}
KERNEL_HALF_LIFE_Y = 1.0
"""Years after its release in which what a generation's kernels lack of their speed halves."""
FLASH_2 = 2023.54
"""When flash attention 2 came out, in years (arXiv:2307.08691)."""
A100_PEAK = 3.12e14
TRAFFIC = 0.3
"""Of a product's memory traffic, what its arithmetic does not hide."""
ALIGNMENT = {name: each.gemm_alignment for name, each in GENERATIONS.items()}
"""Sizes that it divides fill the tiles of a product."""
SOFTMAX_WIDTH = {name: each.softmax_width for name, each in GENERATIONS.items()}
"""Width of a head at which a score's exponential takes as long as its products."""
USUAL_HEAD = 128
SHARPNESS = 4
"""max(device, host) as (d^4 + h^4)^(1/4): where both are equal neither hides all of the other."""
ELEMENTWISE_PASSES, CAST_PASSES = 2.6, 2.5
"""Traffic of a forward and a backward pass together, over that of a forward pass."""
FLASH_BACKWARD, SCORES_BACKWARD = 2.5, 2.0
"""Attention's backward pass over its forward one: flash attention computes the scores again."""
EAGER_SCORES = 1.75
"""Traffic of stored scores where PyTorch runs every operation by itself, over a fused softmax's: 24
bytes forward (product, mask, lower bound, softmax into fp32, cast, product) and 46 backward, over
about 40 (13 and 26) (huggingface/transformers 4.31, OPTAttention in fp16)."""
USUAL_EFFICIENCY = 0.72
"""Of products where `flash` is stated over the peak; elsewhere flash follows the products."""


@dataclass(frozen=True)
class Block:
    """Seconds of a block's forward and backward pass, recomputation included."""

    gemm: Floats
    attention: Floats
    elementwise: Floats
    tp: Floats
    cp: Floats
    ep: Floats
    host: Floats
    """What the device waits for the host that starts its kernels, or between those of a graph."""

    @property
    def total(self) -> Floats:
        """Sum of the parts."""
        return (
            self.gemm + self.attention + self.elementwise + self.tp + self.cp + self.ep + self.host
        )


def tokens(x: Cases) -> Floats:
    """Tokens of a micro-batch on one rank."""
    return x.micro_batch * x.seq_len / x.cp


def product_rate(x: Cases, c: Mapping[str, float], narrow: bool = True) -> Floats:
    """FLOP/s of large GEMMs: peak x efficiency, in the linear layers' dtype or in 16 bit."""
    efficiency = by_word(x, "generation", {name: c[f"gemm_{name}"] for name in GENERATIONS})
    # Clocks under load follow from the power that is there for the arithmetic.
    efficiency = efficiency * x.power ** c["power_exponent"]
    # exp(-immaturity 2^(-age / half-life)): software of a generation's first year is slowest.
    age = np.maximum(0.0, x.software_date - by_word(x, "generation", RELEASE_YEAR))
    efficiency = efficiency * np.exp(-c["kernel_immaturity"] * 2.0 ** (-age / KERNEL_HALF_LIFE_Y))
    efficiency = efficiency * np.where(x.has("implementation", "torch"), c["gemm_torch"], 1.0)
    if not narrow:
        return x.peak_16bit * efficiency
    # Narrow formats reach less of their peak than 16 bit of its own: 8 bit, else 4 bit, and less
    # again where blocks of numbers have scales. Without a narrow peak 16 bit stands.
    share = np.where(x.four_bit > 0, c["gemm_4bit"], c["gemm_8bit"])
    share = share * np.where(x.block_scaled > 0, c["gemm_blocks"], 1.0)
    return np.where(x.peak_narrow > 0, x.peak_narrow * share, x.peak_16bit) * efficiency


def product_s(
    x: Cases, c: Mapping[str, float], rate: Floats, m: Floats, n: Floats, k: Floats
) -> Floats:
    """Seconds of one (m x k) by (k x n) product: 2 m n k / rate + start + part of its traffic."""
    odd = np.minimum(_power_of_two(n), _power_of_two(k)) < by_word(x, "generation", ALIGNMENT)
    start = _start(x, c)
    traffic = TRAFFIC * 2 * (m * k + k * n + m * n) / (x.memory_bytes_per_s * c["memory"])
    return 2 * m * n * k / (rate * np.where(odd, c["gemm_odd"], 1.0)) + start + traffic


def _start(x: Cases, c: Mapping[str, float]) -> Floats:
    """Seconds that a product takes beside its arithmetic, fewer on faster devices."""
    return c["gemm_start_s"] * np.sqrt(A100_PEAK / x.peak_16bit)


def block_time(x: Cases, c: Mapping[str, float]) -> Block:
    """One block's forward and backward pass of one micro-batch.

    A backward pass takes a product for the input's gradient and one for the weight's (the latter
    falls away with frozen weights); flash attention's takes 2.5 times its forward pass. Full
    recomputation adds a forward pass, selective one the attention's, that of the ffn its first
    products, and a gather around a cut sequence.
    """
    linear = _linear(x, c)
    attention = _attention(x, c)
    elementwise, cast = _elementwise(x, c)
    recomputed, again = x.full_recompute, passes_again(x)
    of_norm, of_activation = _ffn_elementwise(x)
    # One of the two gathers and two scatters of a forward pass.
    gathered = x.ffn_recompute * np.where(x.sequence_parallel > 0, 0.25, 0.0)
    activations = (x.ffn_recompute + x.activation_recompute) * of_activation
    backward = np.where(x.frozen > 0, 1.0, 2.0)
    attention_back = np.where(x.flash > 0, FLASH_BACKWARD, SCORES_BACKWARD)
    adapters, around = _adapters(x, c)
    device = Block(
        gemm=linear * (1 + backward + recomputed)
        + x.ffn_recompute * _first_ffn(x, c)
        + adapters * (3 + again),
        attention=attention * (1 + attention_back + np.maximum(recomputed, x.selective_recompute)),
        elementwise=elementwise * (ELEMENTWISE_PASSES + recomputed)
        + elementwise * (activations + x.ffn_recompute * of_norm)
        + cast * (CAST_PASSES + recomputed)
        + around * (3 + again)
        + _summing(x, c),
        tp=_tp(x, c) * (2 + recomputed + gathered),
        cp=context_s(x, c, tokens(x), attention),
        ep=exchange_s(x, c) * (2 + recomputed),
        host=np.zeros(x.size),
    )
    # Until tokens have come the host does not know what to start, so nothing hides the exchange.
    busy = device.total - device.ep
    host = _host(x, c) * (3 + again) / 3
    # A CPU starts its operations itself.
    both = np.where(
        x.has("generation", "cpu"),
        busy + host,
        (busy**SHARPNESS + host**SHARPNESS) ** (1 / SHARPNESS),
    )
    # A graph's kernels follow each other on the device: what lies between adds to what they take.
    launches = launches_s(x, c) * (3 + recomputed) / 3
    waits = both - busy + np.where(x.has("cuda_graphs", "none"), 0.0, launches)
    return Block(**{**vars(device), "host": waits})


def _linear(x: Cases, c: Mapping[str, float]) -> Floats:
    """The four products of a block."""
    t, rate, shards, local = tokens(x), product_rate(x, c), expert_shards(x), local_experts(x)
    heads, kv = x.heads * x.head_dim, x.kv_heads * x.head_dim
    grouped = grouped_rate(x, c, rate, product_rate(x, c, narrow=False))
    several = x.experts > 1
    slower = np.where(several, c["imbalance"] * software_age_factor(x, c), 1.0)
    ffn = local * _ffn(x, c, grouped, tokens_of_each(x), x.ffn / shards) * slower
    # Experts' products start together, as one.
    ffn = ffn - np.where(several, 2 * (local - 1) * _start(x, c), 0.0)
    ffn = ffn + np.where(x.shared_ffn > 0, _ffn(x, c, rate, t, x.shared_ffn / x.tp), 0.0)
    rest = product_s(x, c, rate, t, (heads + 2 * kv) / x.tp, x.hidden) + product_s(
        x, c, rate, t, x.hidden, heads / x.tp
    )
    return rest + ffn


def _ffn(x: Cases, c: Mapping[str, float], rate: Floats, t: Floats, width: Floats) -> Floats:
    """Both products of an ffn, of which the first has the gate as well; `width` is a rank's."""
    up = (1 + x.gated) * width
    return product_s(x, c, rate, t, up, x.hidden) + product_s(x, c, rate, t, x.hidden, width)


def _first_ffn(x: Cases, c: Mapping[str, float]) -> Floats:
    """Seconds of an ffn's first products, which its recomputation does again."""
    up = (1 + x.gated) * (x.ffn * routed(x) + x.shared_ffn) / x.tp
    return product_s(x, c, product_rate(x, c), tokens(x), up, x.hidden)


def passes_again(x: Cases) -> Floats:
    """Forward passes of a block that are done again, a part of one by its share of the weights."""
    ffn = x.ffn * routed(x) + x.shared_ffn
    attention = 2 * (x.heads + x.kv_heads) * x.head_dim
    first = (1 + x.gated) * ffn / (attention + (2 + x.gated) * ffn)
    return x.full_recompute + x.ffn_recompute * first


def _ffn_elementwise(x: Cases) -> tuple[Floats, Floats]:
    """Shares of `_elementwise` that are the ffn's norm and its activation."""
    shared = np.where(x.sequence_parallel > 0, x.tp, 1.0)
    activation = (4 + 2 * x.gated) * (x.ffn * routed(x) + x.shared_ffn) / x.tp
    attention = 3 * (x.heads + 2 * x.kv_heads) * x.head_dim / x.tp
    stream = 12 * x.hidden / shared
    whole = stream + activation + attention
    return 2 * x.hidden / shared / whole, activation / whole


def _summing(x: Cases, c: Mapping[str, float]) -> Floats:
    """Adding a micro-batch's weight gradients to those in fp32: 4 bytes a weight, read and written.

    Newer products do it as they write, so that it counts like their other traffic.
    """
    heads, kv = x.heads * x.head_dim, x.kv_heads * x.head_dim
    ffn = (2 + x.gated) * x.hidden * x.ffn * local_experts(x) / expert_shards(x)
    weights = 2 * x.hidden * (heads + kv) / x.tp + ffn
    share = by_word(x, "implementation", {"softmax": 1.0, "fused": TRAFFIC, "torch": 0.0})
    once = 8 * weights / (x.memory_bytes_per_s * c["memory"])
    return np.where(x.frozen > 0, 0.0, share * once)


def _adapters(x: Cases, c: Mapping[str, float]) -> tuple[Floats, Floats]:
    """An adapter's two thin products of a forward pass, and what they and the sum move."""
    t, widths = tokens(x), x.adapter_widths / x.tp
    products = 2 * t * x.adapter_rank * widths / product_rate(x, c, narrow=False)
    moved = 2 * t * 2 * widths / (x.memory_bytes_per_s * c["memory"]) * c["elementwise"]
    return products, moved * np.where(_is_eager(x), c["elementwise_eager"], 1.0)


def _attention(x: Cases, c: Mapping[str, float]) -> Floats:
    """Both attention products of a forward pass, with softmax.

    4 s t a d / tp FLOP in flash attention, half of it under a causal mask; or all of it and the
    scores, a s t / tp numbers of 2 bytes, read and written in every pass through memory.
    """
    width = np.where(x.score_width > 0, x.score_width, x.head_dim)
    full = 4 * _attended(x) * tokens(x) * x.heads * width / x.tp
    rate = product_rate(x, c, narrow=False)
    new = x.has("generation", "hopper") | x.has("generation", "blackwell")
    torch = np.where(~x.has("implementation", "fused") & new, c["flash_torch"], 1.0)
    torch = torch * np.where(x.software_date < FLASH_2, c["flash_early"], 1.0)
    torch = torch * np.where(x.has("generation", "tpu"), c["flash_tpu"], 1.0)
    torch = torch * _of_narrow_heads(x, width) * _of_narrow_numbers(x, width)
    share = np.where(x.causal > 0, 0.5, 1.0)
    flash = share * full / (rate * c["flash"] / USUAL_EFFICIENCY * torch)
    scores = x.heads * _attended(x) * tokens(x) / x.tp
    moved = 4 * c["scores_passes"] * scores / (x.memory_bytes_per_s * c["memory"])
    moved = moved * np.where(_is_eager(x), EAGER_SCORES, 1.0)
    return np.where(x.flash > 0, flash, full / (x.peak_16bit * c["scores"]) + moved)


def _of_narrow_heads(x: Cases, width: Floats) -> Floats:
    """Rate of attention with heads narrower than 128 over that of such ones: d / (d + e), e the
    width at which exponentials take as long as products.
    """
    even = by_word(x, "generation", SOFTMAX_WIDTH)
    narrow = width / (width + even) * (USUAL_HEAD + even) / USUAL_HEAD
    return np.where(width < USUAL_HEAD, narrow, 1.0)


def _of_narrow_numbers(x: Cases, width: Floats) -> Floats:
    """Rate of attention in 8 bit over that in 16: (d + e) / (d / 2 + e), as exponentials stay.

    Recipes that have experts' own kernels compute it so, but in 4 bit.
    """
    even = by_word(x, "generation", SOFTMAX_WIDTH)
    return np.where(fused(x) & (x.four_bit == 0), (width + even) / (width / 2 + even), 1.0)


def _attended(x: Cases) -> Floats:
    """Tokens that a token's document has, before a mask."""
    return np.where(x.document > 0, np.minimum(x.document, x.seq_len), x.seq_len)


def _elementwise(x: Cases, c: Mapping[str, float]) -> tuple[Floats, Floats]:
    """Norms, activations and residuals of a forward pass; casts to a narrow dtype.

    `widths` are the numbers of 2 bytes that are read or written a token; a cast reads 2 bytes and
    writes 1 of every input of a product.
    """
    rate = x.memory_bytes_per_s * c["memory"]
    shared = np.where(x.sequence_parallel > 0, x.tp, 1.0)
    attention = (x.heads + 2 * x.kv_heads) * x.head_dim
    own = routed(x) * traffic(x, c)
    ffn = x.ffn * own + x.shared_ffn
    permuted = np.where(x.experts > 1, 4 * c["permuted"] * own * x.hidden, 0.0)
    permuted = permuted * software_age_factor(x, c)
    widths = 12 * x.hidden / shared + permuted
    widths = widths + ((4 + 2 * x.gated) * ffn + 3 * attention) / x.tp
    pass_s = 2 * tokens(x) * widths / rate * c["elementwise"]
    inputs = (1 + own) * x.hidden / shared
    inputs = inputs + (x.heads * x.head_dim + ffn * (1 + x.gated)) / x.tp
    cast = np.where(x.peak_narrow > 0, 3 * c["cast_traffic"] * tokens(x) * inputs / rate, 0.0)
    return pass_s * np.where(_is_eager(x), c["elementwise_eager"], 1.0), cast


def _tp(x: Cases, c: Mapping[str, float]) -> Floats:
    """Two all-reduces of t h numbers a forward pass, or the gathers and scatters in their place."""
    overlapped = x.has("implementation", "fused") & (x.sequence_parallel > 0)
    exposed = np.where(overlapped, c["tp_exposed_fused"], c["tp_exposed"])
    starts = np.where(x.sequence_parallel > 0, 2.0, 1.0)
    sums = all_reduce_s(x, c, 2 * tokens(x) * x.hidden, x.tp, np.ones(x.size), starts)
    return 2 * exposed * sums


def _host(x: Cases, c: Mapping[str, float]) -> Floats:
    """Host time of a block's forward and backward pass."""
    whole = by_word(x, "implementation", {name: c[f"host_{name}_s"] for name in IMPLEMENTATIONS})
    for generation in ("volta", "ampere"):
        whole = whole * np.where(x.has("generation", generation), c[f"host_{generation}"], 1.0)
    tp = np.where(x.has("implementation", "fused"), c["host_tp_fused"], c["host_tp"])
    whole = whole * np.where(x.tp > 1, 1 + tp, 1.0)
    # How many tokens come decides the size of experts' products, so these lie outside of a block's
    # graph; a captured iteration has room for as many as may come.
    whole = np.where(x.has("cuda_graphs", "none"), whole, 0.0)
    whole = whole + np.where(x.has("cuda_graphs", "iteration"), 0.0, host_s(x, c))
    return whole * np.where(x.compiled > 0, 0.5, 1.0) * x.cpu_oversubscription


def launches_s(x: Cases, c: Mapping[str, float]) -> Floats:
    """Seconds between a block's kernels in a CUDA graph; narrow products have twice as many."""
    return c["graph_launches_s"] * np.where(x.peak_narrow > 0, 2.0, 1.0)


def by_word(x: Cases, word: str, values: Mapping[str, float]) -> Floats:
    """The value that belongs to each case's word."""
    # Most cases are of one kind of device and software, and few words are looked at.
    there = [name for name in values if x.has(word, name).any()]
    if len(there) == 1 and x.has(word, there[0]).all():
        return np.zeros(x.size) + values[there[0]]
    chosen = np.select([x.has(word, name) for name in values], list(values.values()))
    return np.asarray(chosen, dtype=np.float64)


def _is_eager(x: Cases) -> Bools:
    """Where PyTorch runs every operation by itself."""
    return x.has("implementation", "torch") & (x.compiled == 0)


def _power_of_two(size: Floats) -> Floats:
    """The largest power of two that divides a size."""
    whole = np.maximum(np.round(size), 1).astype(np.int64)
    return (whole & -whole).astype(float)
