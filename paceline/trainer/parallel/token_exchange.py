"""Exchange of tokens between the ranks of the expert axis, which hold parts of the experts.

A rank sorts its rows (one per token and chosen expert) by expert and sends each to the rank that
holds the expert; the results return the same way. There is no capacity limit, so the sizes of the
messages depend on the router. They are exchanged first and read by the CPU, which is the only
synchronization with the device.

The all-to-all of tokens is that of Lepikhin et al., arXiv:2006.16668, section 3.2, with exact
counts in place of a capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.trainer.parallel.collectives import all_to_all_into
from paceline.trainer.parallel.mesh import MeshAxis

EXCHANGE, EXPERTS = "dispatch_s", "experts_s"
"""Parts of a step: the all-to-all of tokens in both directions, and the experts between them."""


class SpanRecorder(Protocol):
    """Measures named parts of a step."""

    def begin_span(self, name: str) -> None:
        """Start a part."""
        ...

    def end_span(self, name: str) -> None:
        """End a part, if it was started."""
        ...


_recorders: list[SpanRecorder] = []


def record_exchanges(recorder: SpanRecorder) -> Callable[[], None]:
    """Measure the exchanges and the experts between them; return a function that stops it."""
    _recorders.append(recorder)
    return _recorders.clear


def _begin(name: str) -> None:
    for recorder in _recorders:
        recorder.begin_span(name)


def _end(name: str) -> None:
    for recorder in _recorders:
        recorder.end_span(name)


@dataclass(frozen=True, eq=False)
class TokenExchange:
    """The messages of one exchange of S rows that this rank sends and R rows that it receives."""

    axis: MeshAxis
    rows_out: list[int]
    """Rows to each rank of the axis."""
    rows_in: list[int]
    """Rows from each rank of the axis."""
    counts: Tensor
    """(E / n,) rows that this rank receives for each of its experts."""
    order: Tensor
    """(R,) position among the received rows of each row sorted by expert."""

    def dispatch(self, rows: Tensor) -> Tensor:
        """Return the rows (R, H) for this rank's experts, by expert, of `rows` (S, H) by expert."""
        return _Dispatch.apply(rows, self)

    def combine(self, rows: Tensor) -> Tensor:
        """Return the results (S, H) of this rank's rows; `rows` (R, H) are in dispatched order."""
        return _Combine.apply(rows, self)


def exchange_tokens(
    rows: Tensor, counts: Tensor, axis: MeshAxis
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Send rows (S, H), sorted by expert, to the ranks of their experts; `counts` as below.

    Return the rows (R, H) for this rank's experts, their counts (E / n,), and the function that
    returns the experts' results (R, H) to their ranks, as (S, H).
    """
    plan = plan_exchange(counts, axis)
    return plan.dispatch(rows), plan.counts, plan.combine


def plan_exchange(counts: Tensor, axis: MeshAxis) -> TokenExchange:
    """Return the exchange of rows of which `counts` (E,) int64 are for each expert, in order.

    Rank i of the axis holds experts i E / n to (i + 1) E / n.
    """
    _begin(EXCHANGE)
    theirs = all_to_all_into(torch.empty_like(counts), counts.contiguous(), axis.group)
    _end(EXCHANGE)
    by_rank = theirs.view(axis.size, -1)  # (n, E / n): rows from each rank for each local expert
    rows_out, rows_in = torch.stack((counts.view(axis.size, -1).sum(1), by_rank.sum(1))).tolist()
    experts = torch.arange(by_rank.shape[1], device=counts.device).repeat(axis.size)
    expert_of_row = experts.repeat_interleave(theirs, output_size=sum(rows_in))
    order = expert_of_row.argsort(stable=True)
    return TokenExchange(axis, rows_out, rows_in, by_rank.sum(0), order)


def _to_experts(rows: Tensor, plan: TokenExchange) -> Tensor:
    by_rank = rows.new_empty(sum(plan.rows_in), *rows.shape[1:])
    _begin(EXCHANGE)
    all_to_all_into(by_rank, rows.contiguous(), plan.axis.group, plan.rows_in, plan.rows_out)
    _end(EXCHANGE)
    _begin(EXPERTS)
    return by_rank.index_select(0, plan.order)


def _from_experts(rows: Tensor, plan: TokenExchange) -> Tensor:
    by_rank = torch.empty_like(rows).index_copy_(0, plan.order, rows)
    results = rows.new_empty(sum(plan.rows_out), *rows.shape[1:])
    _end(EXPERTS)
    _begin(EXCHANGE)
    all_to_all_into(results, by_rank, plan.axis.group, plan.rows_out, plan.rows_in)
    _end(EXCHANGE)
    return results


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: TokenExchange) -> Tensor:
        ctx.plan = plan
        return _to_experts(rows, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _from_experts(grad.contiguous(), ctx.plan), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: TokenExchange) -> Tensor:
        ctx.plan = plan
        return _from_experts(rows.contiguous(), plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _to_experts(grad, ctx.plan), None
