"""Causal attention and rotary position embeddings.

Attention runs in PyTorch's fused kernels. On CPUs a blocked form is faster for short sequences.

Shapes: B sequences of Tq queries and Tk >= Tq keys; N query heads in groups of G over K key/value
heads; head width D. The last query sees all keys and each query before it one key less, so the
queries may be the end of a longer sequence of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Any

import torch
from torch import Tensor, compiler
from torch.nn import functional

from paceline.trainer.model.windowed_attention import HALF_DTYPES, windowed_attention
from paceline.trainer.model_config import ModelConfig

MAX_BLOCKED_TOKENS = 1024
"""Longest sequence for `BlockedAttention`. Beyond it the CPU's fused kernel is as fast, and the
saved probabilities would need Tq x Tk memory."""

YARN_TURNS = (32, 1)
"""Turns over the original positions between which YaRN mixes (the paper's beta and alpha)."""
MAX_PLAIN_TOKENS = 256
"""Longest sequence for unfused attention without a mask on a CPU."""


@contextmanager
def prefer_cudnn_attention(device: torch.device) -> Iterator[None]:
    """Prefer cuDNN's fused attention to FlashAttention-2 on Hopper and later GPUs.

    PyTorch falls back to the next kernel where cuDNN does not support the inputs.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel  # imports the compiler, which is slow

    kernels = ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
    with sdpa_kernel([SDPBackend.__members__[name] for name in kernels], set_priority=True):
        yield


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one rank's attention: tokens, heads and their width; `causal` or to all tokens."""

    tokens: int
    heads: int
    kv_heads: int
    width: int
    causal: bool
    value_width: int | None = None
    """Width of values where it differs."""


def attention_kernel(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str:
    """Return the kernel for this shape: `blocked`, or PyTorch's choice in lower case."""
    max_tokens = MAX_BLOCKED_TOKENS if shape.causal else MAX_PLAIN_TOKENS
    if device.type == "cpu" and shape.tokens <= max_tokens:
        return "blocked" if shape.causal else "math"
    from torch.nn.attention import SDPBackend

    on_gpu = device.type != "cpu"  # CPUs pad values
    q, k, v = (
        torch.empty(1, shape.tokens, heads, width, dtype=dtype, device=device)
        for heads, width in (
            (shape.heads, shape.width),
            (shape.kv_heads, shape.width),
            (shape.kv_heads, (shape.value_width if on_gpu else None) or shape.width),
        )
    )
    parts = (q.requires_grad_(), _expand_kv_heads(q, k), _expand_kv_heads(q, v))
    q, k, v = (x.transpose(1, 2) for x in parts)
    choose: Any = torch._fused_sdp_choice  # pyright: ignore[reportPrivateImportUsage]
    with prefer_cudnn_attention(device):
        choice = choose(q, k, v, is_causal=shape.causal, enable_gqa=q.shape[1] > k.shape[1])
    return SDPBackend(choice).name.lower()


def supports_narrow_values(q: Tensor) -> bool:
    """Return whether values may be narrower than (B, T, N, D) queries without T x T memory.

    The CPU's fused kernel takes one width.
    """
    return q.device.type != "cpu" or q.shape[1] <= MAX_BLOCKED_TOKENS


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from (B, Tq, N, D) queries to (B, Tk, K, D) keys and values; return (B, Tq, N, D).

    Values (B, Tk, K, V) may be narrower, and then so is the result; see `supports_narrow_values`.
    `dropout` is the dropout probability of the attention weights; the CPU's own forms do not
    support it. A query sees at most `window` keys, its own included. `sinks` (N,) are logits that
    take part in the softmax of each head, without a value.
    """
    queries, keys = q.shape[1], k.shape[1]
    if window is not None and window < keys:
        return windowed_attention(q, k, v, window, dropout, sinks)
    if sinks is not None:
        if returns_lse(q.device, q.dtype, dropout):
            return CausalAttentionInParts.apply(q, k, v, sinks)  # type: ignore[no-any-return]
        return windowed_attention(q, k, v, keys, dropout, sinks)
    on_cpu = q.device.type == "cpu" and not dropout
    if on_cpu and queries * keys <= MAX_BLOCKED_TOKENS**2:
        return BlockedAttention.apply(q, k, v)  # type: ignore[no-any-return]
    if on_cpu and queries < keys:
        return CausalAttentionInParts.apply(q, k, v, None)  # type: ignore[no-any-return]
    k, v = _expand_kv_heads(q, k), _expand_kv_heads(q, v)
    settings: dict[str, Any] = {"dropout_p": dropout, "enable_gqa": q.shape[2] > k.shape[2]}
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if queries < keys:
        # This imports the compiler, which takes seconds.
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(queries, keys)
        out = functional.scaled_dot_product_attention(q, k, v, bias, **settings)
    else:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, **settings)
    return out.transpose(1, 2)


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend without a mask from (B, Tq, N, D) to (B, Tk, N, D) keys; return (B, Tq, N, D)."""
    if q.device.type == "cpu" and q.shape[1] * k.shape[1] <= MAX_PLAIN_TOKENS**2:
        heads = q.shape[2]
        q, k, v = (_fold_heads(x) for x in (q * q.shape[-1] ** -0.5, k, v))  # (B N, T, D)
        out = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), v)  # (B N, Tq, D)
        return out.unflatten(0, (-1, heads)).transpose(1, 2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class BlockedAttention(torch.autograd.Function):
    """Causal attention as batched GEMMs over blocks of queries.

    Each block reads the keys up to its own end, which halves the work. The probabilities are saved
    for the backward pass. GEMMs run in the inputs' dtype, the softmax in fp32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, seq_len, heads, width = q.shape
        kv_heads = k.shape[2]
        groups = heads // kv_heads
        rows = (q * width**-0.5).view(batch, seq_len, kv_heads, groups, width)  # (B, T, K, G, D)
        # (B K, G, T, D)
        rows = rows.permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, groups, seq_len, width)
        keys, values = _fold_heads(k), _fold_heads(v)  # (B K, Tk, D)
        out = rows.new_empty(*rows.shape[:-1], v.shape[-1])  # (B K, G, T, V)
        probs: list[Tensor] = []
        for part, end in _blocks(seq_len, k.shape[1]):
            # (B K, G rows, end)
            scores = torch.bmm(rows[:, :, part].flatten(1, 2), keys[:, :end].transpose(1, 2))
            probs.append(_causal_softmax(scores, groups))  # (B K, G rows, end)
            out[:, :, part] = torch.bmm(probs[-1], values[:, :end]).unflatten(1, (groups, -1))
        ctx.save_for_backward(rows, keys, values, *probs)
        ctx.shape = q.shape
        return _unfold_heads(out, batch)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        rows, keys, values, *probs = ctx.saved_tensors
        batch, seq_len, _, width = ctx.shape
        groups = rows.shape[1]
        grad = grad_output.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4)  # (B, K, G, T, D)
        grad = grad.flatten(0, 1)  # (B K, G, T, V)
        grad_rows, grad_keys, grad_values = (
            torch.empty_like(rows),
            torch.zeros_like(keys),
            torch.zeros_like(values),
        )
        for (part, end), p in zip(_blocks(seq_len, keys.shape[1]), probs, strict=True):
            grad_out = grad[:, :, part].flatten(1, 2)  # (B K, G rows, D)
            grad_values[:, :end].baddbmm_(p.transpose(1, 2), grad_out)
            grad_p = torch.bmm(grad_out, values[:, :end].transpose(1, 2))  # (B K, G rows, end)
            grad_s = torch.ops.aten._softmax_backward_data(grad_p, p, -1, p.dtype)
            grad_rows[:, :, part] = torch.bmm(grad_s, keys[:, :end]).unflatten(1, (groups, -1))
            grad_keys[:, :end].baddbmm_(grad_s.transpose(1, 2), rows[:, :, part].flatten(1, 2))
        grad_q = _unfold_heads(grad_rows.mul_(width**-0.5), batch)
        grad_k, grad_v = (  # (B, Tk, K, D or V)
            grad.unflatten(0, (batch, -1)).transpose(1, 2) for grad in (grad_keys, grad_values)
        )
        return grad_q, grad_k, grad_v


class CausalAttentionInParts(torch.autograd.Function):
    """Causal attention from kernel calls that return their log-sum-exp.

    One call covers the queries' own keys with the causal mask. If the queries start after the first
    key, another covers the past keys without a mask. This needs no Tq x Tk memory and computes
    nothing that a mask would discard. Sinks (N,), if any, only add to the sum of exponentials.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        past = k.shape[1] - q.shape[1]
        out, lse, philox = attention_with_lse(q, k[:, past:], v[:, past:], causal=True)
        wide = out.to(torch.promote_types(q.dtype, torch.float32))
        if past:
            part, part_lse, past_philox = attention_with_lse(
                q, k[:, :past], v[:, :past], causal=False
            )
            merge_partial_attention(wide, lse, part, part_lse)
            philox = philox + past_philox
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))  # (B, N, Tq)
            wide = wide * torch.exp(lse - total).transpose(1, 2).unsqueeze(-1)
            lse = total
        out = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *philox)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, out, lse, *philox = ctx.saved_tensors
        past = k.shape[1] - q.shape[1]
        new = q, k[:, past:], v[:, past:], out, lse, *philox[:2]
        grad_q, grad_k, grad_v = partial_attention_backward(grad, *new, causal=True)
        if past:
            old = q, k[:, :past], v[:, :past], out, lse, *philox[2:]
            past_q, past_k, past_v = partial_attention_backward(grad, *old, causal=False)
            grad_q = past_q.add_(grad_q)
            grad_k, grad_v = torch.cat([past_k, grad_k], 1), torch.cat([past_v, grad_v], 1)
        if sinks is None:
            return grad_q, grad_k, grad_v, None
        # As of any score, p (dp - sum_j p_j dp_j); a sink's dp is 0, and the sum is grad . out.
        of_out = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)  # (B, N, Tq)
        share = torch.exp(sinks.to(lse.dtype).unsqueeze(1) - lse)  # (B, N, Tq)
        return grad_q, grad_k, grad_v, -(share * of_out).sum((0, 2)).to(sinks.dtype)


def returns_lse(device: torch.device, dtype: torch.dtype, dropout: float) -> bool:
    """Return whether a fused kernel returns the log-sum-exp of such attention, as sinks need."""
    on_gpu = device.type == "cuda" and dtype in HALF_DTYPES
    return not dropout and (device.type == "cpu" or on_gpu)


PhiloxState = tuple[Tensor, ...]
"""Seed and offset of the CUDA kernel's random numbers, which its backward pass requires."""


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, PhiloxState]:
    """Attend to some of the keys with the device's fused kernel.

    Return the (B, Tq, N, D) output, the (B, N, Tq) log-sum-exp of the scores, with which
    `merge_partial_attention` joins parts, and the kernel's random state for its backward pass. A
    causal part has as many keys as queries.
    """
    k, v = _expand_kv_heads(q, k), _expand_kv_heads(q, v)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out.transpose(1, 2), lse, ()
    if q.dtype not in HALF_DTYPES:
        raise ValueError(f"attention in parts on {q.device.type} needs bf16 or fp16, not {q.dtype}")
    out, lse, *_, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal
    )
    return out.transpose(1, 2), lse, (seed, offset)


def partial_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *philox: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one part's gradients of q, k and v, given the merged output and log-sum-exp."""
    kv_shape, queries, keys = k.shape, q.shape[1], k.shape[1]
    k, v = _expand_kv_heads(q, k), _expand_kv_heads(q, v)
    by_head = (x.transpose(1, 2) for x in (grad, q, k, v, out))  # (B, N, T, D)
    # The kernel reads the log-sum-exp as contiguous memory whatever its strides are.
    lse = lse.contiguous()
    if q.device.type == "cpu":
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *by_head, lse, 0.0, causal
        )
    else:
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *by_head, lse, None, None, queries, keys, 0.0, causal, *philox
        )
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in gradients)
    if k.shape != kv_shape:
        grad_k, grad_v = (x.unflatten(2, (kv_shape[2], -1)).sum(3) for x in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


def merge_partial_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add another part to `out` (B, Tq, N, D) and `lse` (B, N, Tq), in place."""
    # Each part's output is normalized by its own sum, so both are rescaled to the common one.
    total = torch.logaddexp(lse, part_lse)  # (B, N, Tq)
    weight, part_weight = (  # (B, Tq, N, 1) each
        torch.exp(x - total).transpose(1, 2).unsqueeze(-1).to(out.dtype) for x in (lse, part_lse)
    )
    out.mul_(weight).add_(part * part_weight)
    lse.copy_(total)


def _expand_kv_heads(q: Tensor, x: Tensor) -> Tensor:
    """Repeat the heads of keys or values where the kernel does not support grouped heads."""
    groups = q.shape[2] // x.shape[2]
    if groups == 1 or (q.device.type == "cuda" and q.dtype in HALF_DTYPES):
        # On CUDA only the half-precision kernel takes grouped heads without a slow fallback.
        return x
    return x.repeat_interleave(groups, dim=2)


def _causal_softmax(scores: Tensor, groups: int) -> Tensor:
    """Return causal probabilities of (B K, G rows, keys) scores, which may be overwritten.

    The last row sees all keys.
    """
    keys = scores.shape[-1]
    by_row = scores.unflatten(1, (groups, -1))  # (B K, G, rows, keys)
    rows = by_row.shape[2]
    if compiler.is_compiling():
        # Inductor would recompute a mask from the indices for every element.
        by_row = by_row + future_bias(rows, keys, scores.device)
        return torch.softmax(by_row, dim=-1).flatten(1, 2).to(scores.dtype)
    future = torch.ones(rows, rows, dtype=torch.bool).triu_(1)
    by_row[..., keys - rows :].masked_fill_(future, -torch.inf)
    return torch.softmax(scores, dim=-1)


@torch.library.custom_op("paceline::future_bias", mutates_args=())
def future_bias(rows: int, keys: int, device: torch.device) -> Tensor:
    """Return a (rows, keys) fp32 bias with -inf at the keys after a row's own position.

    It is a custom operator because the compiler then keeps its result in memory.
    """
    bias = torch.zeros(rows, keys, device=device)
    bias[:, keys - rows :] = torch.full((rows, rows), -torch.inf, device=device).triu_(1)
    return bias


@future_bias.register_fake
def _(rows: int, keys: int, device: torch.device) -> Tensor:
    return torch.empty(rows, keys, device=device)


def _blocks(queries: int, keys: int) -> list[tuple[slice, int]]:
    """Return each block of queries with the end of its keys.

    Blocks are narrow enough to skip most masked keys and wide enough for efficient GEMMs.
    """
    size, past = max(64, queries // 8), keys - queries
    stops = [(start, min(start + size, queries)) for start in range(0, queries, size)]
    return [(slice(start, stop), past + stop) for start, stop in stops]


def _fold_heads(x: Tensor) -> Tensor:
    """Reshape (B, T, K, D) to (B K, T, D)."""
    return x.transpose(1, 2).flatten(0, 1)


def _unfold_heads(x: Tensor, batch: int) -> Tensor:
    """Reshape (B K, G, T, D) to (B, T, N, D)."""
    return x.view(batch, -1, *x.shape[2:]).transpose(1, 2)


Rope = tuple[Tensor, Tensor] | None
"""Tables of cos and signed sin, (T, 1, D) each; None without rotary positions."""


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of x (B, T, N, D) by their positions.

    The first half of `sin` is negated, so that a roll by half a head pairs the features. Features
    beyond the width of the tables are not rotated.
    """
    if cos.shape[-1] < x.shape[-1]:
        rotary, plain = x.tensor_split([cos.shape[-1]], dim=-1)
        return torch.cat([apply_rotary(rotary, cos, sin), plain], dim=-1)
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)


def rope_tables(
    model: ModelConfig, positions: Tensor, local_layers: bool = False
) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin of rotary embeddings (Su et al., arXiv:2104.09864).

    Both are (T, 1, D) in fp64. Local layers (with a window) may have their own base, and then
    rotate by unscaled positions.
    """
    half = model.rotary_dim // 2
    if local_layers and model.rope_local_theta is not None:
        rate = _rotary_rates(model.rope_local_theta, half)
    else:
        rate = _rotary_rates(model.rope_theta, half) / _rate_divisors(model, half)
    angle = torch.outer(positions.double(), rate)
    cos, sin = (model.rope_attention_factor * table for table in (angle.cos(), angle.sin()))
    return torch.cat([cos, cos], -1).unsqueeze(1), torch.cat([-sin, sin], -1).unsqueeze(1)


def _rotary_rates(theta: float, half: int) -> Tensor:
    """Return the angles (D / 2,) per position of base `theta`."""
    return theta ** (-torch.arange(half, dtype=torch.float64) / half)


def _rate_divisors(model: ModelConfig, half: int) -> Tensor | float:
    """Return the divisor of all angles, or with YaRN (D / 2,) divisors.

    YaRN (Peng et al., arXiv:2309.00071, section 3.2) keeps the angles of features that turn more
    than 32 times over the original positions, divides those that turn less than once, and takes
    a mixture of both rates in between, linear in the feature's index.
    """
    scale, original = model.rope_scaling_factor, model.rope_original_positions
    if original is None:
        return scale
    first, last = (  # index of the feature with this number of turns
        half * log(original / (2 * pi * turns)) / log(model.rope_theta) for turns in YARN_TURNS
    )
    if model.rounds_yarn:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    index = torch.arange(half, dtype=torch.float64)
    scaled = ((index - first) / max(last - first, 1e-3)).clamp(0, 1)
    return 1 / (scaled / scale + 1 - scaled)
