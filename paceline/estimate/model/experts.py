"""Mixture of experts: placement of experts, token dispatch, and the efficiency of their kernels.

Symbols: t tokens of a micro-batch on a rank, k experts per token, ep ranks that share the experts.
Tensor ranks either shard each expert, or hold different unsharded experts (expert tensor
parallelism of 1), each for its own part of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceline.estimate.model.case import Bools, Cases, Floats
from paceline.estimate.model.collectives import all_to_all_s
from paceline.estimate.model.weights import expert_shards

EXPERTS_REFERENCE_DATE = 2026.0
"""Software date (decimal year) at which the coefficients of experts are defined."""
FUSED_EXPERTS_DATE = 2026.4
"""Software date from which Blackwell has fused 8-bit and 4-bit expert kernels that include the
activation and the cast of its result (release notes of Megatron-Bridge 0.5, container 26.06)."""


RESULT_BYTES = 2
"""Bytes per element that returns from experts."""


def active_experts(x: Cases) -> Floats:
    """Return the active experts per token; 1 for a dense ffn."""
    return np.where(x.experts > 1, x.experts_per_token, 1.0)


def software_age_factor(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the slowdown of older MoE software: exp(experts_pace x years before 2026)."""
    return np.exp(c["experts_pace"] * (EXPERTS_REFERENCE_DATE - x.software_date))


def has_fused_expert_kernels(x: Cases) -> Bools:
    """Return True if the software has fused expert kernels for narrow dtypes.

    A captured iteration requires them, because the CPU does not know the tokens per expert.
    """
    has_narrow_kernels = (
        x.is_category("generation", "blackwell")
        & x.is_category("implementation", "fused")
        & (x.peak_narrow > 0)
    )
    has_release = (x.software_date >= FUSED_EXPERTS_DATE) | x.is_category(
        "cuda_graphs", "iteration"
    )
    return has_narrow_kernels & (x.experts > 1) & has_release


def expert_traffic_share(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the share of the experts' elementwise traffic that fused kernels do not absorb."""
    return np.where(has_fused_expert_kernels(x), c["experts_fused"], 1.0)


def grouped_rate(x: Cases, c: Mapping[str, float], rate: Floats, wide: Floats) -> Floats:
    """Return the FLOP/s of grouped expert GEMMs; `rate` and `wide` are those of one large GEMM.

    rate x gemm_grouped x n / (n + grouped_tokens) for n tokens per expert. Narrow dtypes gain only
    a part over the 16-bit rate, wide x (rate / wide)^grouped_narrow, unless kernels are fused or
    scale their operands themselves.
    """
    tokens = tokens_per_expert(x)
    size_factor = tokens / (tokens + c["grouped_tokens"])
    has_full_gain = has_fused_expert_kernels(x) | (x.narrow_experts > 0)
    unfused_rate = wide * (rate / wide) ** c["grouped_narrow"]
    expert_rate = np.where(has_full_gain, rate, unfused_rate) * c["gemm_grouped"] * size_factor
    return np.where(x.experts > 1, expert_rate, rate)


def local_experts(x: Cases) -> Floats:
    """Return the experts of a block on one rank."""
    return np.maximum(x.experts / x.ep, 1.0)


def tokens_per_expert(x: Cases) -> Floats:
    """Return the tokens of a micro-batch per expert, from all ranks that share it."""
    rank_tokens = x.micro_batch * x.seq_len / x.cp * expert_shards(x) / x.tp
    return rank_tokens * active_experts(x) / local_experts(x)


def exchange_s(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the exposed seconds of dispatching tokens to experts and back, forward.

    Tensor ranks split the tokens of a micro-batch between them. All of it is exposed if the run
    states that nothing overlaps.
    """
    element_bytes = (x.dispatch_bytes + RESULT_BYTES) / 2
    rank_tokens = x.micro_batch * x.seq_len / x.cp / x.tp
    num_bytes = element_bytes * rank_tokens * active_experts(x) * x.hidden
    exposed_share = np.where(
        x.is_category("ep_overlap", "any"),
        c["ep_exposed"] * software_age_factor(x, c),
        np.where(x.is_category("ep_overlap", "on"), c["ep_overlapped"], 1.0),
    )
    seconds = all_to_all_s(x, c, num_bytes, x.ep, expert_shards(x) * x.cp, active_experts(x))
    return np.where(x.ep > 1, 2 * exposed_share * seconds, 0.0)


def host_s(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the CPU seconds that experts add to a block: routing and waiting for token counts.

    A fixed capacity (dropped tokens) removes the wait.
    """
    wait_factor = np.where(x.drops_tokens > 0, c["host_capacity"], 1.0)
    return np.where(
        x.experts > 1, c["host_experts_s"] * software_age_factor(x, c) * wait_factor, 0.0
    )
