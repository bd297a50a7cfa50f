"""Attention over sequences of which every rank of an axis holds a part.

A sequence of T tokens is cut into 2n chunks for n ranks; rank i holds chunks i and 2n-1-i, so that
under a causal mask every rank has as much to do: of two chunks, one sees as little as the other
sees much. Shapes: B sequences, t = T / n local tokens, N query heads, K key/value heads, D wide.

Ring attention (Liu et al., arXiv:2310.01889): keys and values travel, queries stay. Own code,
because PyTorch's has no CPU kernel and works through private names that rewrite its dispatcher.
While a rank works on one block of keys the next one arrives. Of another rank's block a query needs
all or nothing: both local chunks need the early keys of an earlier rank, only the late chunk needs
the keys of a later one, and both are half a block of work. Partial outputs are joined by their sums
of exponentials.
"""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
from torch import Tensor

from paceline.trainer.model.attention import (
    attend_part,
    causal_attention,
    full_attention,
    merge,
    part_gradients,
)
from paceline.trainer.model.document_attention import document_attention
from paceline.trainer.parallel.collectives import (
    all_gather_into,
    all_to_all_into,
    gather_sequence,
    reduce_scatter_into,
    send_recv_ring,
)
from paceline.trainer.parallel.mesh import MeshAxis

Views = tuple[Tensor, Tensor, Tensor, Tensor]


def local_positions(seq_len: int, cp: MeshAxis) -> Tensor:
    """Positions (t,) of this rank's tokens in a sequence that 2 x the axis' size divides."""
    return _by_rank(torch.arange(seq_len), cp.size)[cp.index]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: MeshAxis,
    exchange: str,
    dropout: float = 0.0,
    window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """(B, t, N, D) queries, (B, t, K, D) keys and values -> (B, t, N, D) causal attention.

    `exchange` says what moves: "all-gather" the keys and values to everyone (Grattafiori et al.,
    arXiv:2407.21783, section 3.3.2), "all-to-all" tokens against heads (Jacobs et al.,
    arXiv:2309.14509), "ring" the keys and values in a circle (Liu et al., arXiv:2310.01889).
    "all-to-all" needs as many query heads as a multiple of the axis' size; "ring" drops nothing and
    has no `window`, which bounds the keys that a query sees. `documents`, as `document_attention`
    takes them, are for whole sequences alone.
    """
    if documents is not None:
        assert cp.size == 1, "layout checks refuse it"
        return document_attention(q, k, v, documents, dropout, window)
    if cp.size == 1:
        return causal_attention(q, k, v, dropout, window)
    return EXCHANGES[exchange](q, k, v, cp, dropout, window)


def keep_from_compiler() -> None:
    """Have torch.compile leave the exchanges alone, because it cannot trace a wait.

    Done when something is compiled: a decorator would import the compiler, which takes seconds.
    """
    disable: Any = torch.compiler.disable
    for name, exchange in EXCHANGES.items():
        EXCHANGES[name] = disable(exchange)


def attend_all(q: Tensor, k: Tensor, v: Tensor, cp: MeshAxis) -> Tensor:
    """(B, t, N, D) queries, keys and values -> (B, t, N, D) attention to all tokens of all ranks.

    Without a mask it does not matter which tokens a rank holds, if all hold as many.
    """
    return (
        full_attention(q, k, v) if cp.size == 1 else EXCHANGES["unmasked"](q, k, v, cp, 0.0, None)
    )


def _with_all_keys_unmasked(
    q: Tensor, k: Tensor, v: Tensor, cp: MeshAxis, _dropout: float, _window: int | None
) -> Tensor:
    k, v = gather_sequence(torch.cat([k, v], dim=-1), cp).chunk(2, dim=-1)  # (B, T, N, D) each
    return full_attention(q, k, v)


def _with_all_keys(
    q: Tensor, k: Tensor, v: Tensor, cp: MeshAxis, dropout: float, window: int | None
) -> Tensor:
    early_k, early_v, late_k, late_v = _GatherKeys.apply(k, v, cp)  # (B, keys seen, K, D)
    early_q, late_q = q.chunk(2, dim=1)  # (B, t / 2, N, D)
    early = causal_attention(early_q, early_k, early_v, dropout, window)
    late = causal_attention(late_q, late_k, late_v, dropout, window)
    return torch.cat([early, late], dim=1)


def _with_some_heads(
    q: Tensor, k: Tensor, v: Tensor, cp: MeshAxis, dropout: float, window: int | None
) -> Tensor:
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % cp.size:
        raise ValueError(f"{cp.size} context-parallel ranks cannot share {heads} heads evenly")
    copies = lcm(kv_heads, cp.size) // kv_heads
    if copies > 1:
        k, v = k.repeat_interleave(copies, dim=2), v.repeat_interleave(copies, dim=2)
    parts = [x.unflatten(2, (cp.size, -1)) for x in (q, k, v)]  # (B, t, n, heads / n, D)
    local = torch.cat(parts, dim=3).permute(2, 1, 0, 3, 4)  # (n, t, B, all heads / n, D)
    whole = _ToTokens.apply(local, cp).transpose(0, 1)  # (B, T, all heads / n, D)
    q, k, v = whole.split([part.shape[3] for part in parts], dim=2)  # (B, T, heads / n, D)
    out = causal_attention(q, k, v, dropout, window)
    return _ToHeads.apply(out.transpose(0, 1), cp).permute(2, 1, 0, 3, 4).flatten(2, 3)


def _in_a_ring(
    q: Tensor, k: Tensor, v: Tensor, cp: MeshAxis, dropout: float, window: int | None
) -> Tensor:
    assert not dropout and window is None, "layout checks refuse it"
    return RingAttention.apply(q, k, v, cp)  # type: ignore[no-any-return]


EXCHANGES = {
    "all-gather": _with_all_keys,
    "all-to-all": _with_some_heads,
    "ring": _in_a_ring,
    "unmasked": _with_all_keys_unmasked,
}


class _GatherKeys(torch.autograd.Function):
    """Local keys and values -> those that the early chunk sees, those that the late one sees."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, cp: MeshAxis) -> Views:
        packed = torch.stack([k.transpose(0, 1), v.transpose(0, 1)], dim=1)  # (t, 2, B, K, D)
        parts = packed.new_empty(cp.size, *packed.shape)  # (n, t, 2, B, K, D)
        all_gather_into(parts.flatten(0, 1), packed, cp.group)
        whole, chunk = _in_order(parts), k.shape[1] // 2  # (T, 2, B, K, D)
        ctx.cp, ctx.shape = cp, whole.shape
        early, late = (cp.index + 1) * chunk, (2 * cp.size - cp.index) * chunk
        k, v = whole.transpose(0, 2).unbind(1)  # (B, T, K, D)
        return k[:, :early], v[:, :early], k[:, :late], v[:, :late]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        early_k, early_v, late_k, late_v = grads
        whole = late_k.new_empty(ctx.shape)  # (T, 2, B, K, D)
        late, early = late_k.shape[1], early_k.shape[1]
        for of_all, of_early, of_late in zip(
            whole.transpose(0, 2).unbind(1), (early_k, early_v), (late_k, late_v), strict=True
        ):
            of_all[:, :late] = of_late
            of_all[:, :early] += of_early
        whole[late:] = 0
        parts = _by_rank(whole, ctx.cp.size)  # (n, t, 2, B, K, D)
        local = torch.empty_like(parts[0])
        reduce_scatter_into(local, parts.flatten(0, 1), ctx.cp.group)
        grad_k, grad_v = local.transpose(0, 2).unbind(1)
        return grad_k, grad_v, None


class _ToTokens(torch.autograd.Function):
    """(n, t, ...) parts for every rank -> (T, ...) this rank's part of every token."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, cp: MeshAxis) -> Tensor:
        ctx.cp = cp
        return _in_order(_swap(parts, cp))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _swap(_by_rank(grad, ctx.cp.size), ctx.cp), None


class _ToHeads(torch.autograd.Function):
    """(T, ...) this rank's part of every token -> (n, t, ...) parts from every rank."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, cp: MeshAxis) -> Tensor:
        ctx.cp = cp
        return _swap(_by_rank(whole, cp.size), cp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _in_order(_swap(grad, ctx.cp)), None


def _swap(parts: Tensor, cp: MeshAxis) -> Tensor:
    """(n, ...) parts for every rank -> (n, ...) parts from every rank."""
    parts = parts.contiguous()
    return all_to_all_into(torch.empty_like(parts), parts, cp.group)


def _in_order(parts: Tensor) -> Tensor:
    """(n, t, ...) tokens as the ranks hold them -> (T, ...) in the order of the sequence."""
    early, late = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat([*early, *reversed(late)])


def _by_rank(whole: Tensor, size: int) -> Tensor:
    """(T, ...) tokens in the order of the sequence -> (n, t, ...) as the ranks hold them."""
    chunks = whole.unflatten(0, (2 * size, -1))  # (2n, t / 2, ...)
    order = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
    return torch.cat([chunks[chunk] for chunk in order]).unflatten(0, (size, -1))


ALL = slice(None)


class RingAttention(torch.autograd.Function):
    """(B, t, N, D) queries, (B, t, K, D) keys and values of an axis' ranks -> (B, t, N, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp: MeshAxis) -> Tensor:
        ctx.cp = cp
        block = torch.stack([k, v])  # (2, B, t, K, D)
        arriving = _Passage(block, cp)
        out, lse, rest = attend_part(q, k, v, causal=True)  # (B, t, N, D), (B, N, t)
        # Rounding the output after every part would add up.
        wide = out.to(torch.promote_types(q.dtype, torch.float32))
        for step in range(1, cp.size):
            block = arriving.wait()
            if step < cp.size - 1:
                arriving = _Passage(block, cp)
            mine, theirs = _needed(step, cp, q.shape[1])
            keys, values = block[:, :, theirs]  # (B, t or t / 2, K, D)
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
