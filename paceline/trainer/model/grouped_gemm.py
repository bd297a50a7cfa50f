"""One GEMM per expert over rows that are sorted by expert.

GPUs use PyTorch's grouped GEMM, which reads the row counts on the device, so nothing waits for
them. Its weight gradient needs groups that are aligned in memory, so each expert's rows are padded
with zeros. CPUs run one GEMM per expert with rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GroupedGemm = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Differentiable (M, K) x (E, N, K) -> (M, N), in the dtype of the first operand.

The third operand (E,) int32 holds the end of each expert's rows. Rows behind the last are undefined
in the result.
"""
GROUPED_DEVICES = ("cuda",)
"""Devices with a grouped GEMM that is faster than one GEMM per expert."""
GROUPED_DTYPES = (torch.bfloat16,)
"""Dtypes of the grouped GEMM."""
GROUP_ROWS = 16
"""Divisor of the rows of a padded group; 16 rows of 16 bits are 32 bytes."""


def pads_groups(rows: Tensor) -> bool:
    """Return whether these rows take the grouped GEMM, which needs padded groups."""
    return rows.device.type in GROUPED_DEVICES and rows.dtype in GROUPED_DTYPES


def pad_groups(
    rows: Tensor, counts: Tensor, group_rows: int = GROUP_ROWS
) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded rows, the padded counts (E,), and the place (M,) of each row among them.

    `group_rows` divides the padded counts and the number of padded rows. That number is the largest
    possible one, since the counts are on the device. The last rows belong to no expert.
    """
    num_rows, experts = rows.shape[0], counts.shape[0]
    sizes = (counts + group_rows - 1) // group_rows * group_rows  # (E,)
    shift = (sizes - counts).cumsum(0) - (sizes - counts)  # (E,), zeros before each group
    index = torch.arange(num_rows, device=rows.device)
    place = index + shift[torch.searchsorted(counts.cumsum(0), index, right=True)]
    bound = -(-num_rows // group_rows) * group_rows + experts * group_rows
    return rows.new_zeros(bound, rows.shape[1]).index_copy(0, place, rows), sizes, place


def group_members(rows: Tensor, counts: Tensor) -> Tensor:
    """Return (M, E) in the dtype of rows (M, ...): 1 where a row belongs to an expert, else 0.

    With it a GEMM adds each expert's bias, and sums its gradient in a fixed order without a wait
    for `counts` (E,).
    """
    ends = counts.cumsum(0)  # (E,)
    index = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)  # (M, 1)
    return ((index < ends) & (index >= ends - counts)).to(rows.dtype)


def add_group_bias(rows: Tensor, bias: Tensor, members: Tensor) -> Tensor:
    """Return rows_e + b_e of every expert e, of rows (M, N), biases (E, N) and `group_members`.

    Rows of no expert become 0: their values are undefined, and a NaN would spread over GEMMs.
    """
    out = rows + members @ bias
    return out.masked_fill(members.sum(1, keepdim=True) == 0, 0) if pads_groups(rows) else out


def grouped_linear(
    rows: Tensor, weight: Tensor, counts: Tensor, low_precision: GroupedGemm | None = None
) -> Tensor:
    """Return rows_e W_e^T of every expert e: (M, N) of rows (M, K) and weights (E, N, K).

    `counts` (E,) are the numbers of rows of the experts, in order; their sum is M, or less where
    groups are padded. Rows of no expert are undefined in the result. `low_precision` computes it in
    fewer bits than the rows have.
    """
    if low_precision is not None:
        return low_precision(rows, weight, counts.cumsum(0, dtype=torch.int32))
    if pads_groups(rows):
        ends = counts.cumsum(0, dtype=torch.int32)
        return torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)  # pyright: ignore[reportPrivateImportUsage]
    return _linear(rows, weight, counts)


@torch.library.custom_op(
    "paceline::grouped_linear",
    mutates_args=(),
    schema="(Tensor rows, Tensor weight, Tensor counts) -> Tensor",
)
def _linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    start = 0
    for matrix, count in zip(weight, counts.tolist(), strict=True):
        end = start + count
        if count:
            torch.mm(rows[start:end], matrix.t(), out=out[start:end])
        start = end
    return out


@_linear.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op(
    "paceline::grouped_weight_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor rows, Tensor counts) -> Tensor",
)
def _weight_gradient(grad: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Return grad_e^T rows_e of every expert e: (E, N, K) of (M, N) and (M, K)."""
    out = rows.new_empty(counts.shape[0], grad.shape[1], rows.shape[1])
    start = 0
    for expert, count in enumerate(counts.tolist()):
        end = start + count
        torch.mm(grad[start:end].t(), rows[start:end], out=out[expert])
        start = end
    return out


@_weight_gradient.register_fake
def _(grad: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(counts.shape[0], grad.shape[1], rows.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, counts = ctx.saved_tensors
    of_rows, of_weight, _ = ctx.needs_input_grad
    return (
        _linear(grad, weight.transpose(1, 2), counts) if of_rows else None,
        _weight_gradient(grad, rows, counts) if of_weight else None,
        None,
    )


torch.library.register_autograd("paceline::grouped_linear", _backward, setup_context=_save)
