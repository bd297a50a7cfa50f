"""Ring attention (Liu et al., arXiv:2310.01889): keys and values travel, queries stay.

Own code, because PyTorch's has no CPU kernel and works through private names that rewrite its
dispatcher. While a rank works on one block of keys the next one arrives. Rank i holds chunks i and
2n-1-i of the sequence, so of another rank's block a query needs all or nothing: both local chunks
need the early keys of an earlier rank, only the late chunk needs the keys of a later one, and both
are half a block of work. Partial outputs are joined by their sums of exponentials.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.trainer.model.attention import attend_part, merge, part_gradients
from paceline.trainer.parallel.collectives import send_recv_ring
from paceline.trainer.parallel.mesh import MeshAxis

ALL = slice(None)


class RingAttention(torch.autograd.Function):
    """(B, t, N, D) queries, (B, t, K, D) keys and values of an axis' ranks -> (B, t, N, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp: MeshAxis) -> Tensor:
        ctx.cp = cp
        block = torch.stack([k, v])
        arriving = _Passage(block, cp)
        out, lse, rest = attend_part(q, k, v, causal=True)
        # Rounding the output after every part would add up.
        wide = out.to(torch.promote_types(q.dtype, torch.float32))
        for step in range(1, cp.size):
            block = arriving.wait()
            if step < cp.size - 1:
                arriving = _Passage(block, cp)
            mine, theirs = _needed(step, cp, q.shape[1])
            keys, values = block[:, :, theirs]
            part, part_lse, _ = attend_part(q[:, mine], keys, values, causal=False)
            merge(wide[:, mine], lse[:, :, mine], part, part_lse)
        out = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, out, lse, *rest = ctx.saved_tensors
        cp: MeshAxis = ctx.cp
        block = torch.stack([k, v])
        arriving = _Passage(block, cp)
        grad_q, *grad_kv = part_gradients(grad, q, k, v, out, lse, *rest, causal=True)
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q, grad_block = grad_q.to(wide), torch.stack(grad_kv).to(wide)
        for step in range(1, cp.size):
            # The gradients of a block travel with it, one step behind, and end where it began.
            gathered = _Passage(grad_block, cp)
            block = arriving.wait()
            if step < cp.size - 1:
                arriving = _Passage(block, cp)
            mine, theirs = _needed(step, cp, q.shape[1])
            k, v = block[:, :, theirs]
            more_q, *more_kv = part_gradients(
                grad[:, mine], q[:, mine], k, v, out[:, mine], lse[:, :, mine], *rest, causal=False
            )
            grad_q[:, mine] += more_q
            grad_block = gathered.wait()
            grad_block[:, :, theirs] += torch.stack(more_kv)
        grad_k, grad_v = _Passage(grad_block, cp).wait().to(q.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


class _Passage:
    """A tensor on its way to the next rank, while that of the rank before arrives."""

    def __init__(self, leaving: Tensor, cp: MeshAxis) -> None:
        self.leaving, self.arriving = leaving, torch.empty_like(leaving)
        self.works = send_recv_ring(self.arriving, leaving, cp.ranks, cp.index, cp.group)

    def wait(self) -> Tensor:
        """What has arrived."""
        for work in self.works:
            work.wait()
        return self.arriving


def _needed(step: int, cp: MeshAxis, tokens: int) -> tuple[slice, slice]:
    """Local queries, and keys that all of them see, in the block of the rank `step` before."""
    half = tokens // 2
    wrapped = step > cp.index
    return (slice(half, None), ALL) if wrapped else (ALL, slice(half))
