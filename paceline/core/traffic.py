"""Bytes that the layout of a decoder exchanges in one step, by axis and collective.

Symbols: b samples per micro-batch, T tokens of a sample on a rank (s / cp), h hidden size, e bytes
per number in compute, w bytes per number in full precision (4), m micro-batches, L layers per rank,
n ranks of an axis, P parameters per rank. Byte counts are those of the whole tensor that a program
passes to the collective. `LINK_SHARE` is the share that passes the links of each rank. The formulas
are exact for the native trainer. In other frameworks, the large terms are the same (parameters, 4 b
T h L of a tensor-parallel axis).

The modules of core/axes define the terms of each axis, with their sources.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.axes import AXES
from paceline.core.axes.axis import AxisTraffic, Collective
from paceline.core.parallel_run import ParallelRun

__all__ = ["LINK_SHARE", "AxisTraffic", "Collective", "step_traffic", "unsupported_reason"]

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
"""Share of a collective's bytes that passes the links of each rank, for n ranks. The formulas are
those of nccl-tests."""


def unsupported_reason(x: ParallelRun) -> str | None:
    """Return why no formula covers the run, in one sentence; None if one does."""
    layout, shape = x.layout, x.shape
    sharded = layout.zero_stage >= 2 and x.data_ranks > 1
    if shape.kind != "decoder":
        return "traffic is only modeled for decoders"
    if shape.num_experts > 1 and (shape.first_dense_layers or shape.shared_ffn_size):
        return "traffic is not modeled for shared experts and for dense layers before experts"
    if shape.latent_attention is not None or shape.mtp_layers:
        return "traffic is not modeled for latent attention and multi-token prediction"
    if x.lora is not None:
        return "traffic is not modeled for adapters"
    if shape.kv_heads % layout.tp:
        return "traffic is not modeled if tensor ranks hold copies of key/value heads"
    if sharded and layout.pp > 1:
        return f"traffic is not modeled for ZeRO-{layout.zero_stage} in a pipeline"
    if sharded and layout.tp > 1:
        return f"traffic is not modeled for ZeRO-{layout.zero_stage} with tensor parallelism"
    return None


def step_traffic(x: ParallelRun) -> list[AxisTraffic]:
    """Return the traffic of one rank in one step, in bytes. Axes with one rank have no traffic.

    The formula assumes that every target counts in the loss; masked targets add a sum of 8 bytes.
    Check `unsupported_reason` first.
    """
    terms = (term for axis in AXES if axis.traffic for term in axis.traffic(x))
    return [term for term in terms if term.num_bytes]
