"""Causal attention: PyTorch's kernels, and a blocked form, faster on CPUs for short sequences.

Shapes: B sequences of Tq queries and Tk >= Tq keys, N query heads in G-sized groups over K
key/value heads, D wide. The last query sees all keys and each query before it one key less, so the
queries may be the end of a sequence whose beginning only gives keys.

Rotary positions are here as well: tables of angles, and heads turned by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, compiler
from torch.nn import functional

from paceline.trainer.model.windowed_attention import windowed_attention
from paceline.trainer.model_config import ModelConfig

LONGEST_BLOCKED = 1024
"""Beyond this squared the CPU's fused kernel is as fast; kept probabilities need Tq Tk memory."""

LONGEST_PLAIN = 256
"""As LONGEST_BLOCKED, where no mask saves anything."""

HALF = (torch.bfloat16, torch.float16)


@contextmanager
def preferred_kernels(device: torch.device) -> Iterator[None]:
    """cuDNN's fused attention first from Hopper on, where PyTorch would take FlashAttention-2.

    What it does not support goes to the next kernel, as without this.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel  # brings the compiler along

    kernels = ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
    with sdpa_kernel([SDPBackend.__members__[name] for name in kernels], set_priority=True):
        yield


@dataclass(frozen=True)
class AttentionShape:
    """What one rank's attention is of: tokens and heads, `causal` or to all tokens."""

    tokens: int
    heads: int
    kv_heads: int
    width: int
    causal: bool


def attention_kernel(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel that trains on such a shape: `blocked`, or PyTorch's choice in lower case."""
    longest = LONGEST_BLOCKED if shape.causal else LONGEST_PLAIN
    if device.type == "cpu" and shape.tokens <= longest:
        return "blocked" if shape.causal else "math"
    from torch.nn.attention import SDPBackend

    q, k, v = (
        torch.empty(1, shape.tokens, heads, shape.width, dtype=dtype, device=device)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    parts = (q.requires_grad_(), _for_kernel(q, k), _for_kernel(q, v))
    q, k, v = (x.transpose(1, 2) for x in parts)
    choose: Any = torch._fused_sdp_choice  # pyright: ignore[reportPrivateImportUsage]
    with preferred_kernels(device):
        choice = choose(q, k, v, is_causal=shape.causal, enable_gqa=q.shape[1] > k.shape[1])
    return SDPBackend(choice).name.lower()


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, window: int | None = None
) -> Tensor:
    """(B, Tq, N, D) queries over (B, Tk, K, D) keys and values -> (B, Tq, N, D).

    `dropout` is the share of the probabilities that is dropped, by PyTorch's kernels alone; a
    query sees at most `window` keys, its own included.
    """
    queries, keys = q.shape[1], k.shape[1]
    if window is not None and window < keys:
        return windowed_attention(q, k, v, window, dropout)
    on_cpu = q.device.type == "cpu" and not dropout
    if on_cpu and queries * keys <= LONGEST_BLOCKED**2:
        return BlockedAttention.apply(q, k, v)  # type: ignore[no-any-return]
    if on_cpu and queries < keys:
        return LateAttention.apply(q, k, v)  # type: ignore[no-any-return]
    k, v = _for_kernel(q, k), _for_kernel(q, v)
    settings: dict[str, Any] = {"dropout_p": dropout, "enable_gqa": q.shape[2] > k.shape[2]}
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if queries < keys:
        # It brings the compiler along, which takes seconds to import.
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(queries, keys)
        out = functional.scaled_dot_product_attention(q, k, v, bias, **settings)
    else:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, **settings)
    return out.transpose(1, 2)


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, Tq, N, D) queries that see all of (B, Tk, N, D) keys and values -> (B, Tq, N, D)."""
    if q.device.type == "cpu" and q.shape[1] * k.shape[1] <= LONGEST_PLAIN**2:
        heads = q.shape[2]
        q, k, v = (_by_head(x) for x in (q * q.shape[-1] ** -0.5, k, v))  # (B N, T, D)
        out = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), v)  # (B N, Tq, D)
        return out.unflatten(0, (-1, heads)).transpose(1, 2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class BlockedAttention(torch.autograd.Function):
    """Attention as matrix products over blocks of queries, each with the keys up to its end.

    Skipping the blocks above the diagonal halves the work; the probabilities are kept for the
    backward pass. Products run in the inputs' dtype, softmax in fp32 inside.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, seq_len, heads, width = q.shape
        kv_heads = k.shape[2]
        groups = heads // kv_heads
        rows = (q * width**-0.5).view(batch, seq_len, kv_heads, groups, width)  # (B, T, K, G, D)
        # (B K, G, T, D)
        rows = rows.permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, groups, seq_len, width)
        keys, values = _by_head(k), _by_head(v)  # (B K, Tk, D)
        out = torch.empty_like(rows)
        kept: list[Tensor] = []
        for part, end in _blocks(seq_len, k.shape[1]):
            # (B K, G rows, end)
            scores = torch.bmm(rows[:, :, part].flatten(1, 2), keys[:, :end].transpose(1, 2))
            kept.append(_causal_softmax(scores, groups))  # (B K, G rows, end)
            out[:, :, part] = torch.bmm(kept[-1], values[:, :end]).unflatten(1, (groups, -1))
        ctx.save_for_backward(rows, keys, values, *kept)
        ctx.shape = q.shape
        return _by_token(out, q.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        rows, keys, values, *kept = ctx.saved_tensors
        batch, seq_len, _, width = ctx.shape
        groups = rows.shape[1]
        grad = grad_output.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4)  # (B, K, G, T, D)
        grad = grad.reshape(rows.shape)  # (B K, G, T, D)
        grad_rows, grad_keys, grad_values = (
            torch.empty_like(rows),
            torch.zeros_like(keys),
            torch.zeros_like(values),
        )
        for (part, end), p in zip(_blocks(seq_len, keys.shape[1]), kept, strict=True):
            above = grad[:, :, part].flatten(1, 2)  # (B K, G rows, D)
            grad_values[:, :end].baddbmm_(p.transpose(1, 2), above)
            by_p = torch.bmm(above, values[:, :end].transpose(1, 2))  # (B K, G rows, end)
            by_score = torch.ops.aten._softmax_backward_data(by_p, p, -1, p.dtype)
            grad_rows[:, :, part] = torch.bmm(by_score, keys[:, :end]).unflatten(1, (groups, -1))
            grad_keys[:, :end].baddbmm_(by_score.transpose(1, 2), rows[:, :, part].flatten(1, 2))
        grad_q = _by_token(grad_rows.mul_(width**-0.5), ctx.shape)
        kv_shape = (batch, -1, keys.shape[1], width)
        return (
            grad_q,
            grad_keys.view(kv_shape).transpose(1, 2),
            grad_values.view(kv_shape).transpose(1, 2),
        )


class LateAttention(torch.autograd.Function):
    """Queries that begin after the keys, from two kernels: all of the past, and the causal rest.

    It needs no Tq x Tk memory, and does no work that a mask would throw away.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = k.shape[1] - q.shape[1]
        out, lse, _ = attend_part(q, k[:, past:], v[:, past:], causal=True)
        wide = out.to(torch.promote_types(q.dtype, torch.float32))
        merge(wide, lse, *attend_part(q, k[:, :past], v[:, :past], causal=False)[:2])
        out = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        past = k.shape[1] - q.shape[1]
        old = part_gradients(grad, q, k[:, :past], v[:, :past], out, lse, causal=False)
        new = part_gradients(grad, q, k[:, past:], v[:, past:], out, lse, causal=True)
        return old[0].add_(new[0]), torch.cat([old[1], new[1]], 1), torch.cat([old[2], new[2]], 1)


Rest = tuple[Tensor, ...]


def attend_part(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Rest]:
    """Attention over some of the keys, by the fused kernel of the device.

    (B, Tq, N, D), and (B, N, Tq) logarithms of the sums of exponentials, with which `merge` joins
    parts; and what the kernel's backward pass wants back. A causal part has as many keys as
    queries.
    """
    k, v = _for_kernel(q, k), _for_kernel(q, v)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out.transpose(1, 2), lse, ()
    if q.dtype not in HALF:
        raise ValueError(f"attention in parts on {q.device.type} needs bf16 or fp16, not {q.dtype}")
    out, lse, *_, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal
    )
    return out.transpose(1, 2), lse, (seed, offset)


def part_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """This part's gradients of q, k and v, given the output and logarithms of all parts merged."""
    shape, queries, keys = k.shape, q.shape[1], k.shape[1]
    k, v = _for_kernel(q, k), _for_kernel(q, v)
    by_head = (x.transpose(1, 2) for x in (grad, q, k, v, out))  # (B, N, T, D)
    # The kernel reads the logarithms as if they lay close together.
    lse = lse.contiguous()
    if q.device.type == "cpu":
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *by_head, lse, 0.0, causal
        )
    else:
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *by_head, lse, None, None, queries, keys, 0.0, causal, *rest
        )
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in gradients)
    if k.shape != shape:
        grad_k, grad_v = (x.unflatten(2, (shape[2], -1)).sum(3) for x in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Take another part into `out` (B, Tq, N, D) and `lse` (B, N, Tq), in place."""
    total = torch.logaddexp(lse, more_lse)  # (B, N, Tq)
    old, new = (
        torch.exp(x - total).transpose(1, 2).unsqueeze(-1).to(out.dtype) for x in (lse, more_lse)
    )
    out.mul_(old).add_(more * new)
    lse.copy_(total)


def _for_kernel(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values with as many heads as the kernel for q needs."""
    groups = q.shape[2] // x.shape[2]
    if groups == 1 or (q.device.type == "cuda" and q.dtype in HALF):
        # On CUDA only the half-precision kernel takes grouped heads without a slow fallback.
        return x
    return x.repeat_interleave(groups, dim=2)


def _causal_softmax(scores: Tensor, groups: int) -> Tensor:
    """(B K, G rows, keys), which it may overwrite, -> probabilities; the last row sees all keys."""
    keys = scores.shape[-1]
    by_row = scores.unflatten(1, (groups, -1))  # (B K, G, rows, keys)
    rows = by_row.shape[2]
    if compiler.is_compiling():
        # A mask would be computed anew for every element, by its index.
        by_row = by_row + future_bias(rows, keys, scores.device)
        return torch.softmax(by_row, dim=-1).flatten(1, 2).to(scores.dtype)
    future = torch.ones(rows, rows, dtype=torch.bool).triu_(1)
    by_row[..., keys - rows :].masked_fill_(future, -torch.inf)
    return torch.softmax(scores, dim=-1)


@torch.library.custom_op("paceline::future_bias", mutates_args=())
def future_bias(rows: int, keys: int, device: torch.device) -> Tensor:
    """(rows, keys) of fp32: -inf for keys behind a row's own, of which the last row's is the last.

    An operator, because the compiler leaves what it gives in memory.
    """
    bias = torch.zeros(rows, keys, device=device)
    bias[:, keys - rows :] = torch.full((rows, rows), -torch.inf, device=device).triu_(1)
    return bias


@future_bias.register_fake
def _(rows: int, keys: int, device: torch.device) -> Tensor:
    return torch.empty(rows, keys, device=device)


def _blocks(queries: int, keys: int) -> list[tuple[slice, int]]:
    """Blocks of queries and the end of their keys.

    Narrow enough to skip most of the future, wide enough for a product.
    """
    size, past = max(64, queries // 8), keys - queries
    stops = [(start, min(start + size, queries)) for start in range(0, queries, size)]
    return [(slice(start, stop), past + stop) for start, stop in stops]


def _by_head(x: Tensor) -> Tensor:
    """(B, T, K, D) -> (B K, T, D)."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_token(x: Tensor, shape: torch.Size) -> Tensor:
    """(B K, G, T, D) -> (B, T, N, D)."""
    batch, seq_len, _, width = shape
    return x.view(batch, -1, seq_len, width).transpose(1, 2)


Rope = tuple[Tensor, Tensor] | None
"""Tables of cos and signed sin, (T, 1, D) each; None where positions do not rotate."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, T, N, D) turned by its positions; `sin` carries the sign of the half it belongs to.

    Features beyond those of the tables stay as they are.
    """
    if cos.shape[-1] < x.shape[-1]:
        turned, rest = x.tensor_split([cos.shape[-1]], dim=-1)
        return torch.cat([rotate(turned, cos, sin), rest], dim=-1)
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)


def rope_tables(
    model: ModelConfig, positions: Tensor, windowed: bool = False
) -> tuple[Tensor, Tensor]:
    """cos and signed sin of rotary embeddings (Su et al., arXiv:2104.09864), (T, 1, D) in fp64.

    Layers with a window may have a base of their own, and then rotate by unscaled positions.
    """
    half = model.rotary_dim // 2
    theta, scale = model.rope_theta, model.rope_scaling_factor
    if windowed and model.rope_local_theta is not None:
        theta, scale = model.rope_local_theta, 1.0
    rate = theta ** (-torch.arange(half, dtype=torch.float64) / half) / scale
    angle = torch.outer(positions.double(), rate)
    cos, sin = (model.rope_attention_factor * table for table in (angle.cos(), angle.sin()))
    return torch.cat([cos, cos], -1).unsqueeze(1), torch.cat([-sin, sin], -1).unsqueeze(1)


def rope_tables_on(
    device: torch.device,
    dtype: torch.dtype,
    model: ModelConfig,
    positions: Tensor,
    windowed: bool = False,
) -> tuple[Tensor, Tensor]:
    """The tables where and in what they are used."""
    cos, sin = rope_tables(model, positions, windowed)
    return cos.to(device, dtype), sin.to(device, dtype)
