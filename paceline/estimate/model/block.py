"""Time of one transformer block for one micro-batch on one rank, by part.

Symbols, one value per case: t tokens of a micro-batch on a rank, h hidden size, a d and g d widths
of queries and keys, s tokens of a sample. tp divides the sizes of GEMMs, cp divides tokens. All
arrays have the shape (cases,).

    GEMM         2 m n k / rate + start + part of its memory traffic: FLOP / (FLOP/s) = s
    attention    4 s t a d / tp FLOP of both its products, half of it under a causal mask
    elementwise  2 bytes x widths x t / memory rate, norms, activations, residuals
    exchange     bytes / rate of the group + start, collectives.py

Rates are those of the data sheet times a coefficient (coefficients.py) that is fitted to measured
steps. Sources: FLOPs of a block, Narayanan et al., arXiv:2104.04473; flash attention's backward
pass of 2.5 forward passes, Dao, arXiv:2307.08691; selective recompute, Korthikanti et al.,
arXiv:2205.05198.
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
    active_experts,
    exchange_s,
    expert_traffic_share,
    grouped_rate,
    has_fused_expert_kernels,
    host_s,
    local_experts,
    software_age_factor,
    tokens_per_expert,
)
from paceline.estimate.model.weights import expert_shards
from paceline.files import catalog

BYTES = 2


def context_parallel_seconds(
    x: Cases, c: Mapping[str, float], tokens: Floats, attention: Floats
) -> Floats:
    """Return the seconds that context parallelism adds to a block, forward and backward.

    `tokens` is t, `attention` the seconds of attention's forward pass.
    """
    seconds = _ring_exchange(x, c, tokens, attention)
    for exchange, of in (
        ("all-gather", _all_gather_exchange),
        ("all-to-all", _all_to_all_exchange),
    ):
        rows = x.is_category("cp_exchange", exchange)
        if rows.any():
            seconds = np.where(rows, of(x, c, tokens), seconds)
    return np.where(x.cp > 1, seconds, 0.0)


def _ring_exchange(x: Cases, c: Mapping[str, float], tokens: Floats, attention: Floats) -> Floats:
    """Return the seconds of ring attention, also the default if the exchange is unknown.

    Keys and values, 2 tensors of t g d / tp elements, come from each of cp - 1 ranks; the backward
    pass moves twice as much. Attention overlaps all but a share `cp_exposed` of it.
    """
    num_bytes = (x.cp - 1) * 2 * BYTES * tokens * x.kv_heads * x.head_dim / x.tp
    span = x.tp * x.cp
    exchange_s = num_bytes / group_rate(x, c, span, x.tp) + start_s(x, c, span) * (x.cp - 1)
    overlapped = np.minimum(exchange_s, attention)
    return (exchange_s - overlapped + c["cp_exposed"] * overlapped) * (3 + x.full_recompute)


def _all_gather_exchange(x: Cases, c: Mapping[str, float], tokens: Floats) -> Floats:
    """Return the seconds of gathering all keys and values, and of scattering their gradients.

    A gather plus a scatter moves as much as an all-reduce; neither overlaps with attention.
    """
    num_bytes = x.cp * 2 * BYTES * tokens * x.kv_heads * x.head_dim / x.tp
    exchange_s = all_reduce_s(x, c, num_bytes, x.cp, x.tp, 2.0)
    recompute_share = np.maximum(x.full_recompute, x.selective_recompute)
    return exchange_s * (1 + recompute_share / 2)


def _all_to_all_exchange(x: Cases, c: Mapping[str, float], tokens: Floats) -> Floats:
    """Return the seconds of the all-to-alls from token shards to head shards and back (Ulysses).

    Key/value heads are replicated until the ranks can split them evenly (lcm). Nothing overlaps
    with the exchanges (Jacobs et al., arXiv:2309.14509).
    """
    kv_heads = np.maximum(1, x.kv_heads // x.tp).astype(np.int64)
    shared = np.lcm(kv_heads, x.cp.astype(np.int64)) * x.tp
    head, alone = BYTES * tokens * x.head_dim / x.tp, np.ones(x.size)

    def swap_s(heads: Floats) -> Floats:
        return all_to_all_s(x, c, head * heads, x.cp, x.tp, alone)

    to_tokens, to_heads = swap_s(x.heads + 2 * shared), swap_s(x.heads)
    recompute_share = np.maximum(x.full_recompute, x.selective_recompute)
    return to_tokens * (2 + recompute_share) + to_heads * (2 + x.full_recompute)


GENERATIONS = catalog.generations()
"""Device generations as declared in generations.yaml of the catalog."""
IMPLEMENTATIONS = ("softmax", "fused", "torch")
RELEASE_YEAR = {name: each.release_year for name, each in GENERATIONS.items()}
KERNEL_HALF_LIFE_Y = 1.0
"""Years in which the slowdown of a new generation's immature kernels halves (fitted)."""
FLASH_2_DATE = 2023.54
"""Release date of FlashAttention-2 as a decimal year (arXiv:2307.08691)."""
A100_PEAK_FLOPS_PER_S = 3.12e14
EXPOSED_GEMM_TRAFFIC = 0.3
"""Fraction of a GEMM's memory traffic that is not overlapped with compute."""
ALIGNMENT = {name: each.gemm_alignment for name, each in GENERATIONS.items()}
"""Alignment at which GEMM dimensions fill whole tiles, by generation."""
SOFTMAX_WIDTH = {name: each.softmax_width for name, each in GENERATIONS.items()}
"""Head dimension at which the softmax exponentials take as long as the GEMMs of attention."""
REFERENCE_HEAD_DIM = 128
SHARPNESS = 4
"""Exponent of the soft maximum of device time d and CPU time h, (d^4 + h^4)^(1/4)."""
ELEMENTWISE_PASSES, CAST_PASSES = 2.6, 2.5
FOUR_BIT_GAIN = 4.0
"""Ratio of the 4-bit to the 16-bit peak of Blackwell GPUs; B300 and GB300 have 6. GEMMs of a B300
are 3.4 times as fast in nvfp4 as in bf16 (TransformerEngine's guide to GEMM profiling, inputs
quantized before), 3.7 times without the exposed memory traffic: 0.75 of the root of 4 x 6."""
FOUR_BIT_CASTS = 2.3
"""Time of a cast to nvfp4 over one to mxfp8, because of Hadamard transforms and two levels of
scales (same source: 2.69 and 1.18 ms per layer)."""
"""Memory traffic of forward plus backward pass, divided by that of the forward pass."""
FLASH_BACKWARD, SCORES_BACKWARD = 2.5, 2.0
"""Ratio of attention's backward to forward time; flash attention recomputes the scores."""
EAGER_SCORES = 1.75
"""Traffic of stored scores in eager PyTorch, divided by that of a fused softmax kernel: 24 bytes
forward (GEMM, mask, lower bound, softmax into fp32, cast, GEMM) and 46 backward, over about 40 (13
and 26) (huggingface/transformers 4.31, OPTAttention in fp16)."""
REFERENCE_GEMM_EFFICIENCY = 0.72
"""GEMM efficiency at which the coefficient `flash` is defined; attention scales with GEMMs."""


@dataclass(frozen=True)
class Block:
    """Seconds of a block's forward and backward pass, recompute included."""

    gemm: Floats
    attention: Floats
    elementwise: Floats
    tp: Floats
    cp: Floats
    ep: Floats
    host: Floats
    """CPU launch overhead: the device waits for launches, or between kernels of a CUDA graph."""

    @property
    def total(self) -> Floats:
        """Sum of all parts."""
        return (
            self.gemm + self.attention + self.elementwise + self.tp + self.cp + self.ep + self.host
        )


def tokens(x: Cases) -> Floats:
    """Return the tokens of a micro-batch on one rank."""
    return x.micro_batch * x.seq_len / x.cp


def gemm_rate(x: Cases, c: Mapping[str, float], narrow: bool = True) -> Floats:
    """Return the FLOP/s of large GEMMs in the layers' dtype, or in 16 bit if not `narrow`."""
    efficiency = select_by_category(
        x, "generation", {name: c[f"gemm_{name}"] for name in GENERATIONS}
    )
    # Clocks under load depend on the power limit: rate ~ (limit / data-sheet power)^exponent.
    efficiency = efficiency * x.power ** c["power_exponent"]
    # exp(-immaturity 2^(-age / half-life)): kernels are slowest in a generation's first year.
    age = np.maximum(0.0, x.software_date - select_by_category(x, "generation", RELEASE_YEAR))
    efficiency = efficiency * np.exp(-c["kernel_immaturity"] * 2.0 ** (-age / KERNEL_HALF_LIFE_Y))
    efficiency = efficiency * np.where(
        x.is_category("implementation", "torch"), c["gemm_torch"], 1.0
    )
    if not narrow:
        return x.peak_16bit * efficiency
    # 8-bit and 4-bit GEMMs reach a smaller share of their peak than 16-bit ones, and less with
    # block scales. A device without a narrow peak computes in 16 bit.
    share = np.where(x.four_bit > 0, c["gemm_4bit"], c["gemm_8bit"])
    share = share * np.where(x.block_scaled > 0, c["gemm_blocks"], 1.0)
    # GEMMs use the root of the 4-bit peak that B300 and GB300 have beyond other Blackwell GPUs.
    excess = np.maximum(1.0, x.peak_narrow / (FOUR_BIT_GAIN * x.peak_16bit))
    is_blackwell_4bit = (x.four_bit > 0) & x.is_category("generation", "blackwell")
    peak = x.peak_narrow / np.where(is_blackwell_4bit, np.sqrt(excess), 1.0)
    return np.where(x.peak_narrow > 0, peak * share, x.peak_16bit) * efficiency


def gemm_seconds(
    x: Cases, c: Mapping[str, float], rate: Floats, m: Floats, n: Floats, k: Floats
) -> Floats:
    """Return the seconds of an (m, k) x (k, n) GEMM: 2 m n k / rate + start + exposed traffic."""
    is_unaligned = np.minimum(_power_of_two(n), _power_of_two(k)) < select_by_category(
        x, "generation", ALIGNMENT
    )
    start = _start(x, c)
    moved_s = (
        EXPOSED_GEMM_TRAFFIC * 2 * (m * k + k * n + m * n) / (x.memory_bytes_per_s * c["memory"])
    )
    return 2 * m * n * k / (rate * np.where(is_unaligned, c["gemm_odd"], 1.0)) + start + moved_s


def _start(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the fixed seconds per GEMM, which fall with the root of the device's peak."""
    return c["gemm_start_s"] * np.sqrt(A100_PEAK_FLOPS_PER_S / x.peak_16bit)


def block_time(x: Cases, c: Mapping[str, float]) -> Block:
    """Return the time of one block's forward and backward pass of one micro-batch.

    Each linear layer has one backward GEMM for the input gradient and one for the weight gradient
    (none if frozen). The backward pass of flash attention takes 2.5 times its forward pass. Full
    recompute adds a forward pass, selective recompute that of attention, and ffn recompute the
    first GEMMs of the ffn plus, with sequence parallelism, a gather.
    """
    linear = _linear(x, c)
    attention = _attention(x, c)
    elementwise, cast = _elementwise(x, c)
    full_recompute, recomputed_passes = x.full_recompute, recompute_passes(x)
    of_norm, of_activation = _ffn_elementwise(x)
    # One of the two gathers and two scatters of a forward pass.
    extra_gathers = x.ffn_recompute * np.where(x.sequence_parallel > 0, 0.25, 0.0)
    gate = x.gate_recompute * (1 - full_recompute - x.ffn_recompute)
    activations = (x.ffn_recompute + x.activation_recompute + gate) * of_activation
    backward = np.where(x.frozen > 0, 1.0, 2.0)
    attention_back = np.where(x.flash > 0, FLASH_BACKWARD, SCORES_BACKWARD)
    adapters, adapter_traffic = _adapters(x, c)
    device = Block(
        gemm=linear * (1 + backward + full_recompute)
        + x.ffn_recompute * _first_ffn(x, c)
        + adapters * (3 + recomputed_passes),
        attention=attention
        * (1 + attention_back + np.maximum(full_recompute, x.selective_recompute)),
        elementwise=elementwise * (ELEMENTWISE_PASSES + full_recompute)
        + elementwise * (activations + x.ffn_recompute * of_norm)
        + cast * (CAST_PASSES + full_recompute)
        + adapter_traffic * (3 + recomputed_passes)
        + _gradient_accumulation(x, c),
        tp=_tp(x, c) * (2 + full_recompute + extra_gathers),
        cp=context_parallel_seconds(x, c, tokens(x), attention),
        ep=exchange_s(x, c) * (2 + full_recompute),
        host=np.zeros(x.size),
    )
    # The CPU cannot launch expert GEMMs before the tokens arrive: no overlap of launches with ep.
    busy = device.total - device.ep
    host = _host(x, c) * (3 + recomputed_passes) / 3
    # On a CPU device, launches and compute run on the same cores and add up.
    busy_with_host = np.where(
        x.is_category("generation", "cpu"),
        busy + host,
        (busy**SHARPNESS + host**SHARPNESS) ** (1 / SHARPNESS),
    )
    # In a CUDA graph the gaps between kernels add to the kernel time.
    launches = launches_s(x, c) * (3 + full_recompute) / 3
    waits = busy_with_host - busy + np.where(x.is_category("cuda_graphs", "none"), 0.0, launches)
    return Block(**{**vars(device), "host": waits})


def _linear(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the seconds of a block's four linear GEMMs, forward."""
    t, rate, shards, local = tokens(x), gemm_rate(x, c), expert_shards(x), local_experts(x)
    heads, kv = x.heads * x.head_dim, x.kv_heads * x.head_dim
    expert_rate = grouped_rate(x, c, rate, gemm_rate(x, c, narrow=False))
    has_experts = x.experts > 1
    slower = np.where(has_experts, c["imbalance"] * software_age_factor(x, c), 1.0)
    ffn = local * _ffn(x, c, expert_rate, tokens_per_expert(x), x.ffn / shards) * slower
    # The GEMMs of all local experts are one grouped launch.
    ffn = ffn - np.where(has_experts, 2 * (local - 1) * _start(x, c), 0.0)
    ffn = ffn + np.where(x.shared_ffn > 0, _ffn(x, c, rate, t, x.shared_ffn / x.tp), 0.0)
    attention = gemm_seconds(x, c, rate, t, (heads + 2 * kv) / x.tp, x.hidden) + gemm_seconds(
        x, c, rate, t, x.hidden, heads / x.tp
    )
    return attention + ffn


def _ffn(x: Cases, c: Mapping[str, float], rate: Floats, t: Floats, width: Floats) -> Floats:
    """Return the seconds of an ffn's GEMMs, gate included; `width` is that of one rank."""
    up = (1 + x.gated) * width
    return gemm_seconds(x, c, rate, t, up, x.hidden) + gemm_seconds(x, c, rate, t, x.hidden, width)


def _first_ffn(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the seconds of an ffn's first GEMMs, which ffn recompute repeats."""
    up = (1 + x.gated) * (x.ffn * active_experts(x) + x.shared_ffn) / x.tp
    return gemm_seconds(x, c, gemm_rate(x, c), tokens(x), up, x.hidden)


def recompute_passes(x: Cases) -> Floats:
    """Return the recomputed forward passes per block; partial ones count by their weights."""
    ffn = x.ffn * active_experts(x) + x.shared_ffn
    attention = 2 * (x.heads + x.kv_heads) * x.head_dim
    first = (1 + x.gated) * ffn / (attention + (2 + x.gated) * ffn)
    return x.full_recompute + x.ffn_recompute * first


def _ffn_elementwise(x: Cases) -> tuple[Floats, Floats]:
    """Return the shares of `_elementwise` that are the ffn's norm and its activation."""
    shared = np.where(x.sequence_parallel > 0, x.tp, 1.0)
    activation = (4 + 2 * x.gated) * (x.ffn * active_experts(x) + x.shared_ffn) / x.tp
    attention = 3 * (x.heads + 2 * x.kv_heads) * x.head_dim / x.tp
    stream = 12 * x.hidden / shared
    whole = stream + activation + attention
    return 2 * x.hidden / shared / whole, activation / whole


def _gradient_accumulation(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the seconds of accumulating weight gradients in fp32: 4 bytes read and written each.

    Newer GEMM kernels fuse the accumulation, so only their exposed traffic counts.
    """
    heads, kv = x.heads * x.head_dim, x.kv_heads * x.head_dim
    ffn = (2 + x.gated) * x.hidden * x.ffn * local_experts(x) / expert_shards(x)
    weights = 2 * x.hidden * (heads + kv) / x.tp + ffn
    share = select_by_category(
        x, "implementation", {"softmax": 1.0, "fused": EXPOSED_GEMM_TRAFFIC, "torch": 0.0}
    )
    sum_s = 8 * weights / (x.memory_bytes_per_s * c["memory"])
    return np.where(x.frozen > 0, 0.0, share * sum_s)


def _adapters(x: Cases, c: Mapping[str, float]) -> tuple[Floats, Floats]:
    """Return the seconds of the adapters' GEMMs and of their memory traffic, forward."""
    t, widths = tokens(x), x.adapter_widths / x.tp
    gemm_s = 2 * t * x.adapter_rank * widths / gemm_rate(x, c, narrow=False)
    traffic_s = 2 * t * 2 * widths / (x.memory_bytes_per_s * c["memory"]) * c["elementwise"]
    return gemm_s, traffic_s * np.where(_is_eager(x), c["elementwise_eager"], 1.0)


def _attention(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the seconds of attention's forward pass.

    Flash attention executes 4 s t a d / tp FLOP, half of it under a causal mask. Attention that
    stores its scores executes all of it and also moves a s t / tp scores of 2 bytes per pass.
    """
    width = np.where(x.score_width > 0, x.score_width, x.head_dim)
    full = 4 * _document_tokens(x) * tokens(x) * x.heads * width / x.tp
    rate = gemm_rate(x, c, narrow=False)
    since_hopper = x.is_category("generation", "hopper") | x.is_category("generation", "blackwell")
    # Factors on flash attention's rate: PyTorch's kernels since Hopper, FlashAttention-1, TPU
    # kernels, and narrow heads or dtypes. They multiply, and each is 1 where it does not apply.
    rate_factor = np.where(
        ~x.is_category("implementation", "fused") & since_hopper, c["flash_torch"], 1.0
    )
    rate_factor = rate_factor * np.where(x.software_date < FLASH_2_DATE, c["flash_early"], 1.0)
    rate_factor = rate_factor * np.where(x.is_category("generation", "tpu"), c["flash_tpu"], 1.0)
    rate_factor = rate_factor * _narrow_head_rate(x, width) * _narrow_dtype_rate(x, width)
    share = np.where(x.causal > 0, 0.5, 1.0)
    flash = share * full / (rate * c["flash"] / REFERENCE_GEMM_EFFICIENCY * rate_factor)
    scores = x.heads * _document_tokens(x) * tokens(x) / x.tp
    traffic_s = 4 * c["scores_passes"] * scores / (x.memory_bytes_per_s * c["memory"])
    traffic_s = traffic_s * np.where(_is_eager(x), EAGER_SCORES, 1.0)
    return np.where(x.flash > 0, flash, full / (x.peak_16bit * c["scores"]) + traffic_s)


def _narrow_head_rate(x: Cases, width: Floats) -> Floats:
    """Return the relative rate of attention with heads narrower than 128: d / (d + e), normalised.

    e is the head dimension at which exponentials take as long as GEMMs.
    """
    softmax_width = select_by_category(x, "generation", SOFTMAX_WIDTH)
    narrow = (
        width / (width + softmax_width) * (REFERENCE_HEAD_DIM + softmax_width) / REFERENCE_HEAD_DIM
    )
    return np.where(width < REFERENCE_HEAD_DIM, narrow, 1.0)


def _narrow_dtype_rate(x: Cases, width: Floats) -> Floats:
    """Return the relative rate of 8-bit attention: (d + e) / (d / 2 + e).

    GEMMs take half the time and exponentials do not change. It applies to recipes with fused
    expert kernels, except in 4 bit.
    """
    softmax_width = select_by_category(x, "generation", SOFTMAX_WIDTH)
    return np.where(
        has_fused_expert_kernels(x) & (x.four_bit == 0),
        (width + softmax_width) / (width / 2 + softmax_width),
        1.0,
    )


def _document_tokens(x: Cases) -> Floats:
    """Return the tokens of a token's document, before masking."""
    return np.where(x.document > 0, np.minimum(x.document, x.seq_len), x.seq_len)


def _elementwise(x: Cases, c: Mapping[str, float]) -> tuple[Floats, Floats]:
    """Return the seconds of elementwise operations of a forward pass, and of casts to 8 or 4 bit.

    `widths` counts the 2-byte elements read or written per token by norms, activations and
    residuals. A cast reads 2 bytes and writes 1 per input element of a GEMM.
    """
    rate = x.memory_bytes_per_s * c["memory"]
    shared = np.where(x.sequence_parallel > 0, x.tp, 1.0)
    attention = (x.heads + 2 * x.kv_heads) * x.head_dim
    active = active_experts(x) * expert_traffic_share(x, c)
    ffn = x.ffn * active + x.shared_ffn
    sort_widths = np.where(x.experts > 1, 4 * c["permuted"] * active * x.hidden, 0.0)
    sort_widths = sort_widths * software_age_factor(x, c)
    widths = 12 * x.hidden / shared + sort_widths
    widths = widths + ((4 + 2 * x.gated) * ffn + 3 * attention) / x.tp
    pass_s = 2 * tokens(x) * widths / rate * c["elementwise"]
    cast_widths = (1 + active) * x.hidden / shared
    cast_widths = cast_widths + (x.heads * x.head_dim + ffn * (1 + x.gated)) / x.tp
    cast = np.where(x.peak_narrow > 0, 3 * c["cast_traffic"] * tokens(x) * cast_widths / rate, 0.0)
    cast = cast * np.where(x.four_bit > 0, FOUR_BIT_CASTS, 1.0)
    return pass_s * np.where(_is_eager(x), c["elementwise_eager"], 1.0), cast


def _tp(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the seconds of two all-reduces of t h elements, or of equivalent gathers/scatters."""
    overlapped = x.is_category("implementation", "fused") & (x.sequence_parallel > 0)
    exposed = np.where(overlapped, c["tp_exposed_fused"], c["tp_exposed"])
    starts = np.where(x.sequence_parallel > 0, 2.0, 1.0)
    sums = all_reduce_s(x, c, 2 * tokens(x) * x.hidden, x.tp, np.ones(x.size), starts)
    return 2 * exposed * sums


def _host(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the CPU launch time of a block's forward and backward pass in seconds."""
    launch_s = select_by_category(
        x, "implementation", {name: c[f"host_{name}_s"] for name in IMPLEMENTATIONS}
    )
    # CPUs of V100 and A100 nodes take longer than later ones (coefficients.py). Tensor parallelism
    # adds a share of CPU time.
    for generation in ("volta", "ampere"):
        launch_s = launch_s * np.where(
            x.is_category("generation", generation), c[f"host_{generation}"], 1.0
        )
    tp = np.where(x.is_category("implementation", "fused"), c["host_tp_fused"], c["host_tp"])
    launch_s = launch_s * np.where(x.tp > 1, 1 + tp, 1.0)
    # The size of expert GEMMs depends on the routing, so they are outside of a block's CUDA graph.
    # A captured iteration reserves room for the maximum number of tokens.
    launch_s = np.where(x.is_category("cuda_graphs", "none"), launch_s, 0.0)
    launch_s = launch_s + np.where(x.is_category("cuda_graphs", "iteration"), 0.0, host_s(x, c))
    return launch_s * np.where(x.compiled > 0, 0.5, 1.0) * x.cpu_oversubscription


def launches_s(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the seconds between kernels in a CUDA graph; narrow dtypes have twice as many."""
    return c["graph_launches_s"] * np.where(x.peak_narrow > 0, 2.0, 1.0)


def select_by_category(x: Cases, category: str, values: Mapping[str, float]) -> Floats:
    """Return for each case the value of its category."""
    # Shortcut: mostly all cases have the same device and software.
    present = [name for name in values if x.is_category(category, name).any()]
    if len(present) == 1 and x.is_category(category, present[0]).all():
        return np.zeros(x.size) + values[present[0]]
    selection = np.select([x.is_category(category, name) for name in values], list(values.values()))
    return np.asarray(selection, dtype=np.float64)


def _is_eager(x: Cases) -> Bools:
    """Return True for eager PyTorch, without fused or compiled blocks."""
    return x.is_category("implementation", "torch") & (x.compiled == 0)


def _power_of_two(size: Floats) -> Floats:
    """Return the largest power of two that divides a size."""
    whole = np.maximum(np.round(size), 1).astype(np.int64)
    return (whole & -whole).astype(float)
