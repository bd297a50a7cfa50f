"""What experts add to a block: who holds them, how tokens reach them, what their software can do.

Symbols: t tokens of a micro-batch on a rank, k experts of a token, ep ranks that share the experts.
Tensor ranks either share each expert, or hold different whole ones (expert tensor parallelism of
1), each for its own part of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceline.estimate.model.case import Bools, Cases, Floats
from paceline.estimate.model.collectives import all_to_all_s
from paceline.estimate.model.weights import expert_shards

EXPERTS_YEAR = 2026.0
"""Of the software to which experts' coefficients belong; it has changed from release to release."""
FUSED_SINCE = 2026.4
"""Since when experts' products in 8 and 4 bit have kernels of their own on Blackwell, which also
apply the activation and cast its result (release notes of Megatron-Bridge 0.5, container 26.06)."""


def routed(x: Cases) -> Floats:
    """Experts that a token meets, 1 for an ffn without."""
    return np.where(x.experts > 1, x.experts_per_token, 1.0)


def software_age_factor(x: Cases, c: Mapping[str, float]) -> Floats:
    """Time of what experts add over that of 2026's software: e to the pace x years before."""
    return np.exp(c["experts_pace"] * (EXPERTS_YEAR - x.software_date))


def fused(x: Cases) -> Bools:
    """Whether experts' products in narrow formats have kernels of their own.

    A whole step that is captured has them: no host knows how many tokens an expert gets.
    """
    able = x.has("generation", "blackwell") & x.has("implementation", "fused") & (x.peak_narrow > 0)
    there = (x.software_date >= FUSED_SINCE) | x.has("cuda_graphs", "iteration")
    return able & (x.experts > 1) & there


def traffic(x: Cases, c: Mapping[str, float]) -> Floats:
    """Share of experts' own memory traffic that their kernels leave to others."""
    return np.where(fused(x), c["experts_fused"], 1.0)


def grouped_rate(x: Cases, c: Mapping[str, float], rate: Floats, wide: Floats) -> Floats:
    """FLOP/s of experts' products side by side, `rate` and `wide` those of one as large.

    In narrow formats without kernels of their own they take the time of 16 bit, `wide`.
    """
    each = tokens_of_each(x)
    few = each / (each + c["grouped_tokens"])
    own = np.where(fused(x), rate, wide) * c["gemm_grouped"] * few
    return np.where(x.experts > 1, own, rate)


def local_experts(x: Cases) -> Floats:
    """Experts of a block on one rank."""
    return np.maximum(x.experts / x.ep, 1.0)


def tokens_of_each(x: Cases) -> Floats:
    """Tokens of a micro-batch that one expert gets from all ranks that share it."""
    own = x.micro_batch * x.seq_len / x.cp * expert_shards(x) / x.tp
    return own * routed(x) / local_experts(x)


def exchange_s(x: Cases, c: Mapping[str, float]) -> Floats:
    """Seconds of bringing tokens to their experts and back in a forward pass, as far as it shows.

    Tensor ranks share out a micro-batch's tokens to send them. All of it shows where a run states
    that nothing overlaps.
    """
    sent = 2 * x.micro_batch * x.seq_len / x.cp / x.tp * routed(x) * x.hidden
    shown = np.where(
        x.has("ep_overlap", "any"),
        c["ep_exposed"] * software_age_factor(x, c),
        np.where(x.has("ep_overlap", "on"), c["ep_overlapped"], 1.0),
    )
    seconds = all_to_all_s(x, c, sent, x.ep, expert_shards(x) * x.cp, routed(x))
    return np.where(x.ep > 1, 2 * shown * seconds, 0.0)


def host_s(x: Cases, c: Mapping[str, float]) -> Floats:
    """Host time that experts add to a block: routing, and waiting for how many tokens each gets.

    With a capacity beyond which tokens are dropped there is nothing to wait for.
    """
    waits = np.where(x.drops_tokens > 0, c["host_capacity"], 1.0)
    return np.where(x.experts > 1, c["host_experts_s"] * software_age_factor(x, c) * waits, 0.0)
