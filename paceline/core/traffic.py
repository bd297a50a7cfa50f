"""Bytes that a decoder's layout moves in one step, by axis and collective.

Symbols: b samples of a micro-batch, T tokens of a sample on a rank (s / cp), h hidden size, e bytes
of a number in compute, w of one in full precision (4), m micro-batches, L layers of a rank, n ranks
of an axis, P parameters of a rank. Bytes are those of the whole tensor, as a program hands it over;
through each rank's links pass the shares of `LINK_SHARE`. Exact for the native trainer; of other
frameworks the large terms are the same (parameters, 4 b T h L of a tensor axis).

The terms of an axis, with their sources, are in its module of core/axes.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.axes import AXES
from paceline.core.axes.axis import AxisTraffic, Collective
from paceline.core.parallel_run import ParallelRun

__all__ = ["LINK_SHARE", "AxisTraffic", "Collective", "step_traffic", "unpredicted"]

LINK_SHARE: dict[Collective, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send": lambda n: 1.0,
    "recv": lambda n: 1.0,
}
"""Of a collective's bytes, what passes each rank's links among n ranks, as nccl-tests counts it."""


def unpredicted(x: ParallelRun) -> str | None:
    """Return why there is no formula, one sentence; None when there is one."""
    layout, shape = x.layout, x.shape
    sharded = layout.zero_stage >= 2 and x.data_ranks > 1
    if shape.kind != "decoder" or shape.num_experts > 1:
        return "what moves is known for decoders without experts alone"
    if shape.latent_attention is not None or shape.mtp_layers:
        return "what moves is not known for latent attention and layers that predict more tokens"
    if x.lora is not None:
        return "what moves is not known for adapters"
    if shape.kv_heads % layout.tp:
        return "what moves is not known where tensor ranks hold copies of key/value heads"
    if sharded and layout.pp > 1:
        return f"what moves is not known for ZeRO-{layout.zero_stage} in a pipeline"
    if sharded and layout.tp > 1:
        return f"what moves is not known for ZeRO-{layout.zero_stage} beside tensor parallelism"
    return None


def step_traffic(x: ParallelRun) -> list[AxisTraffic]:
    """Return all that a rank exchanges in a step, in bytes; nothing over axes of one rank.

    Assumes that every target counts: masked ones add a sum of 8 bytes. Ask `unpredicted` first.
    """
    terms = (term for axis in AXES if axis.traffic for term in axis.traffic(x))
    return [term for term in terms if term.num_bytes]
