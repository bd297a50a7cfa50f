"""Context parallelism: attention over sequences that are split over the ranks of an axis.

A sequence of T tokens is split into 2n chunks for n ranks. Rank i holds chunks i and 2n-1-i, so
that the causal mask leaves every rank the same amount of work. Shapes: B sequences, t = T / n local
tokens, N query heads, K key/value heads of width D.

Ring attention (Liu et al., arXiv:2310.01889): keys and values move around the ring, queries stay.
It is implemented here because PyTorch's version has no CPU kernel and patches its dispatcher
through private names. The next block of keys arrives while a rank works on the current one. Of
another rank's block, a query needs all keys or none: both local chunks need the early keys of a
lower rank, only the late chunk needs the keys of a higher rank, and either case is half a block of
work. Partial outputs are merged by their log-sum-exp.
"""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.trainer.model.attention import (
    attention_with_lse,
    causal_attention,
    full_attention,
    merge_partial_attention,
    partial_attention_backward,
    supports_narrow_values,
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

KVPairs = tuple[Tensor, Tensor, Tensor, Tensor]


def local_positions(seq_len: int, cp: MeshAxis) -> Tensor:
    """Return the positions (t,) of this rank's tokens; 2 x the axis' size must divide `seq_len`."""
    return _to_rank_order(torch.arange(seq_len), cp.size)[cp.index]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: MeshAxis,
    exchange: str,
    dropout: float = 0.0,
    window: int | None = None,
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally from (B, t, N, D) queries to (B, t, K, D) keys; return (B, t, N, D).

    `exchange` selects the communication. "all-gather" sends the keys and values to every rank
    (Grattafiori et al., arXiv:2407.21783, section 3.3.2). "all-to-all" trades tokens for heads
    (Ulysses; Jacobs et al., arXiv:2309.14509); the number of query heads must be a multiple of the
    axis' size. "ring" passes keys and values around the ranks (Liu et al., arXiv:2310.01889), and
    supports neither dropout nor sinks nor `window`, the maximum number of keys that a query sees.
    `sinks` (N,) are those of `causal_attention`. `documents`, as in `document_attention`, requires
    whole sequences. Values (B, t, K, V) may be narrower than keys.
    """
    plain = cp.size == 1 and documents is None and window is None
    if v.shape[-1] < q.shape[-1] and not (plain and supports_narrow_values(q)):
        # Exchanges and the other kernels take keys and values of one width.
        padded = functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
        out = attend(q, k, padded, cp, exchange, dropout, window, documents, sinks)
        return out[..., : v.shape[-1]]
    if documents is not None:
        assert cp.size == 1, "the layout checks reject this"
        return document_attention(q, k, v, documents, dropout, window, sinks)
    if cp.size == 1:
        return causal_attention(q, k, v, dropout, window, sinks)
    return EXCHANGES[exchange](q, k, v, cp, dropout, window, sinks)


def exclude_exchanges_from_compile() -> None:
    """Exclude the exchanges from torch.compile, which cannot trace a wait.

    Call it before compiling. A decorator would import the compiler, which takes seconds.
    """
    disable: Any = torch.compiler.disable
    for name, exchange in EXCHANGES.items():
        EXCHANGES[name] = disable(exchange)


def full_attention_over_ranks(q: Tensor, k: Tensor, v: Tensor, cp: MeshAxis) -> Tensor:
    """Attend without a mask from (B, t, N, D) queries to the tokens of all ranks.

    Without a mask the ranks may hold any tokens, as long as each holds the same number.
    """
    if cp.size == 1:
        return full_attention(q, k, v)
    return EXCHANGES["unmasked"](q, k, v, cp, 0.0, None, None)


def _all_gather_unmasked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: MeshAxis,
    _dropout: float,
    _window: int | None,
    _sinks: Tensor | None,
) -> Tensor:
    k, v = gather_sequence(torch.cat([k, v], dim=-1), cp).chunk(2, dim=-1)  # (B, T, N, D) each
    return full_attention(q, k, v)


def _all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: MeshAxis,
    dropout: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    early_k, early_v, late_k, late_v = _GatherKeys.apply(k, v, cp)  # (B, keys seen, K, D)
    early_q, late_q = q.chunk(2, dim=1)  # (B, t / 2, N, D)
    early = causal_attention(early_q, early_k, early_v, dropout, window, sinks)
    late = causal_attention(late_q, late_k, late_v, dropout, window, sinks)
    return torch.cat([early, late], dim=1)


def _all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: MeshAxis,
    dropout: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % cp.size:
        raise ValueError(f"{cp.size} context-parallel ranks cannot share {heads} heads evenly")
    copies = lcm(kv_heads, cp.size) // kv_heads
    if copies > 1:
        k, v = k.repeat_interleave(copies, dim=2), v.repeat_interleave(copies, dim=2)
    parts = [x.unflatten(2, (cp.size, -1)) for x in (q, k, v)]  # (B, t, n, heads / n, D)
    local = torch.cat(parts, dim=3).permute(2, 1, 0, 3, 4)  # (n, t, B, all heads / n, D)
    all_tokens = _HeadsToTokens.apply(local, cp).transpose(0, 1)  # (B, T, all heads / n, D)
    q, k, v = all_tokens.split([part.shape[3] for part in parts], dim=2)  # (B, T, heads / n, D)
    if sinks is not None:
        sinks = sinks.chunk(cp.size)[cp.index]
    out = causal_attention(q, k, v, dropout, window, sinks)
    return _TokensToHeads.apply(out.transpose(0, 1), cp).permute(2, 1, 0, 3, 4).flatten(2, 3)


def _ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: MeshAxis,
    dropout: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    assert not dropout and window is None and sinks is None, "the layout checks reject this"
    return RingAttention.apply(q, k, v, cp)  # type: ignore[no-any-return]


EXCHANGES = {
    "all-gather": _all_gather_attention,
    "all-to-all": _all_to_all_attention,
    "ring": _ring_attention,
    "unmasked": _all_gather_unmasked_attention,
}


class _GatherKeys(torch.autograd.Function):
    """Gather local keys and values into those that the early and the late chunk see."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, cp: MeshAxis) -> KVPairs:
        packed = torch.stack([k.transpose(0, 1), v.transpose(0, 1)], dim=1)  # (t, 2, B, K, D)
        parts = packed.new_empty(cp.size, *packed.shape)  # (n, t, 2, B, K, D)
        all_gather_into(parts.flatten(0, 1), packed, cp.group)
        whole, chunk = _to_sequence_order(parts), k.shape[1] // 2  # (T, 2, B, K, D)
        ctx.cp, ctx.shape = cp, whole.shape
        early, late = (cp.index + 1) * chunk, (2 * cp.size - cp.index) * chunk
        k, v = whole.transpose(0, 2).unbind(1)  # (B, T, K, D)
        return k[:, :early], v[:, :early], k[:, :late], v[:, :late]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        early_k, early_v, late_k, late_v = grads
        whole = late_k.new_empty(ctx.shape)  # (T, 2, B, K, D)
        late, early = late_k.shape[1], early_k.shape[1]
        for grad_all, grad_early, grad_late in zip(
            whole.transpose(0, 2).unbind(1), (early_k, early_v), (late_k, late_v), strict=True
        ):
            grad_all[:, :late] = grad_late
            grad_all[:, :early] += grad_early
        whole[late:] = 0
        parts = _to_rank_order(whole, ctx.cp.size)  # (n, t, 2, B, K, D)
        local = torch.empty_like(parts[0])
        reduce_scatter_into(local, parts.flatten(0, 1), ctx.cp.group)
        grad_k, grad_v = local.transpose(0, 2).unbind(1)
        return grad_k, grad_v, None


class _HeadsToTokens(torch.autograd.Function):
    """Exchange (n, t, ...) parts for every rank for (T, ...), this rank's heads of all tokens."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, cp: MeshAxis) -> Tensor:
        ctx.cp = cp
        return _to_sequence_order(_swap(parts, cp))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _swap(_to_rank_order(grad, ctx.cp.size), ctx.cp), None


class _TokensToHeads(torch.autograd.Function):
    """Exchange (T, ...), this rank's heads of all tokens, for (n, t, ...) heads of local tokens."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, cp: MeshAxis) -> Tensor:
        ctx.cp = cp
        return _swap(_to_rank_order(whole, cp.size), cp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _to_sequence_order(_swap(grad, ctx.cp)), None


def _swap(parts: Tensor, cp: MeshAxis) -> Tensor:
    """Exchange (n, ...) parts for every rank for (n, ...) parts from every rank."""
    parts = parts.contiguous()
    return all_to_all_into(torch.empty_like(parts), parts, cp.group)


def _to_sequence_order(parts: Tensor) -> Tensor:
    """Reorder (n, t, ...) tokens as the ranks hold them to (T, ...) in sequence order."""
    early, late = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat([*early, *reversed(late)])


def _to_rank_order(whole: Tensor, size: int) -> Tensor:
    """Reorder (T, ...) tokens in sequence order to (n, t, ...) as the ranks hold them."""
    chunks = whole.unflatten(0, (2 * size, -1))  # (2n, t / 2, ...)
    order = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
    return torch.cat([chunks[chunk] for chunk in order]).unflatten(0, (size, -1))


ALL_TOKENS = slice(None)


class RingAttention(torch.autograd.Function):
    """Ring attention of (B, t, N, D) queries to (B, t, K, D) keys and values of all ranks."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp: MeshAxis) -> Tensor:
        ctx.cp = cp
        block = torch.stack([k, v])  # (2, B, t, K, D)
        kv_transfer = _RingShift(block, cp)
        out, lse, philox = attention_with_lse(q, k, v, causal=True)  # (B, t, N, D), (B, N, t)
        # Merge in fp32, because rounding errors of every part would add up.
        acc_dtype = out.to(torch.promote_types(q.dtype, torch.float32))
        for step in range(1, cp.size):
            block = kv_transfer.wait()
            if step < cp.size - 1:
                kv_transfer = _RingShift(block, cp)
            q_part, k_part = _visible_slices(step, cp, q.shape[1])
            keys, values = block[:, :, k_part]  # (B, t or t / 2, K, D)
            part, part_lse, _ = attention_with_lse(q[:, q_part], keys, values, causal=False)
            merge_partial_attention(acc_dtype[:, q_part], lse[:, :, q_part], part, part_lse)
        out = acc_dtype.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *philox)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, out, lse, *philox = ctx.saved_tensors
        cp: MeshAxis = ctx.cp
        block = torch.stack([k, v])
        kv_transfer = _RingShift(block, cp)
        grad_q, *grad_kv = partial_attention_backward(grad, q, k, v, out, lse, *philox, causal=True)
        acc_dtype = torch.promote_types(q.dtype, torch.float32)
        grad_q, grad_block = grad_q.to(acc_dtype), torch.stack(grad_kv).to(acc_dtype)
        for step in range(1, cp.size):
            # A block's gradients follow it one step behind and end at the rank that owns it.
            grad_transfer = _RingShift(grad_block, cp)
            block = kv_transfer.wait()
            if step < cp.size - 1:
                kv_transfer = _RingShift(block, cp)
            q_part, k_part = _visible_slices(step, cp, q.shape[1])
            k, v = block[:, :, k_part]
            part_q, *part_kv = partial_attention_backward(
                grad[:, q_part],
                q[:, q_part],
                k,
                v,
                out[:, q_part],
                lse[:, :, q_part],
                *philox,
                causal=False,
            )
            grad_q[:, q_part] += part_q
            grad_block = grad_transfer.wait()
            grad_block[:, :, k_part] += torch.stack(part_kv)
        grad_k, grad_v = _RingShift(grad_block, cp).wait().to(q.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


class _RingShift:
    """An asynchronous send to the next rank of the ring and receive from the previous one."""

    def __init__(self, send: Tensor, cp: MeshAxis) -> None:
        # The sent tensor must stay alive until the transfer ends.
        self.send_buffer, self.recv_buffer = send, torch.empty_like(send)
        self.works = send_recv_ring(self.recv_buffer, send, cp.ranks, cp.index, cp.group)

    def wait(self) -> Tensor:
        """Return the received tensor once it is complete."""
        for work in self.works:
            work.wait()
        return self.recv_buffer


def _visible_slices(step: int, cp: MeshAxis, tokens: int) -> tuple[slice, slice]:
    """Return the slice of local queries and the slice of keys that all of them see.

    The keys are those of the block that arrives after `step` shifts.
    """
    half = tokens // 2
    from_higher_rank = step > cp.index
    return (slice(half, None), ALL_TOKENS) if from_higher_rank else (ALL_TOKENS, slice(half))
