"""The flat rule that every model must beat: a fixed share of the peak, for all that computes."""

from __future__ import annotations

import numpy as np

from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.model.weights import common_weights, ffn_weights

SHARE, NARROW_SHARE = 0.45, 0.33
"""Of the 16-bit peak, and of the peak of a dtype narrower than that."""


def flat_rule_s(x: Cases) -> Floats:
    """Seconds of a step at 45 % of the 16-bit peak (33 % of a narrower one).

    FLOP of a token: 2 a weight and pass, forward, twice backward and once more with recomputation,
    and those of attention's two products; the head is never recomputed.
    """
    active = np.where(x.experts > 1, x.experts_per_token / x.experts, 1.0)
    weights = x.layers * (common_weights(x) + ffn_weights(x) * active)
    attention = 2 * x.layers * x.seq_len * x.heads * x.head_dim * np.where(x.causal > 0, 0.5, 1.0)
    passes = 3 + x.full_recompute
    per_token = passes * (2 * weights + 2 * attention) + 6 * x.vocab * x.hidden
    rate = np.where(x.peak_narrow > 0, NARROW_SHARE * x.peak_narrow, SHARE * x.peak_16bit)
    return per_token * x.seq_len * x.global_batch / x.devices / rate
