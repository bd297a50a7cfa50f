"""The blocked attention is attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.trainer.model import attention
from paceline.trainer.model.attention import (
    AttentionShape,
    BlockedAttention,
    CausalAttentionInParts,
    attention_kernel,
    attention_with_lse,
    causal_attention,
    merge_partial_attention,
    partial_attention_backward,
)

SHAPES = [(2, 130, 4, 2, 8), (1, 64, 3, 3, 6), (2, 37, 4, 1, 8), (1, 600, 2, 1, 4), (1, 1, 2, 2, 4)]
"""Batch, tokens, heads, key/value heads, width: also lengths that blocks do not divide."""


def with_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    out = causal_attention(q, k, v)
    above = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad(out, (q, k, v), above)]


@pytest.mark.parametrize(("batch", "tokens", "heads", "kv_heads", "width"), SHAPES)
def test_blocks_give_what_the_kernel_gives(
    batch: int, tokens: int, heads: int, kv_heads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (
        torch.randn(batch, tokens, n, width, dtype=torch.float64, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    blocked = with_gradients(q, k, v)
    monkeypatch.setattr(attention, "MAX_BLOCKED_TOKENS", 0)

    for found, wanted in zip(blocked, with_gradients(q, k, v), strict=True):
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)


def test_its_gradients_are_those_of_its_output() -> None:
    q, k, v = (torch.randn(1, 5, n, 2, dtype=torch.float64, requires_grad=True) for n in (2, 1, 1))

    assert torch.autograd.gradcheck(BlockedAttention.apply, (q, k, v))


@pytest.mark.parametrize("length", [0, 1024])
def test_half_precision_stays_close(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_BLOCKED_TOKENS", length)
    q, k, v = (torch.randn(2, 100, n, 16) for n in (4, 2, 2))
    half = causal_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()).float()

    assert (half - causal_attention(q, k, v)).norm() < 0.02 * half.norm()


LATE = [(70, 200, 4, 2), (64, 128, 3, 3), (1, 9, 4, 1), (130, 131, 2, 2), (600, 900, 2, 1)]
"""Queries, keys, heads, key/value heads: the queries are a sequence's end."""


@pytest.mark.parametrize("longest", [0, 1024])
@pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads"), LATE)
def test_the_last_queries_of_a_sequence_get_what_the_whole_gives_them(
    queries: int, keys: int, heads: int, kv_heads: int, longest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    q, k, v = (
        torch.randn(2, keys, n, 8, dtype=torch.float64, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    whole = causal_attention(q, k, v)[:, keys - queries :]
    above = torch.randn_like(whole)
    wanted = [whole, *torch.autograd.grad(whole, (q, k, v), above)]
    monkeypatch.setattr(attention, "MAX_BLOCKED_TOKENS", longest)

    late = causal_attention(q[:, keys - queries :], k, v)

    for a, b in zip([late, *torch.autograd.grad(late, (q, k, v), above)], wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", [BlockedAttention, CausalAttentionInParts])
def test_gradients_of_late_queries_are_those_of_their_output(
    form: type[torch.autograd.Function],
) -> None:
    q, k, v = (
        torch.randn(1, tokens, n, 2, dtype=torch.float64, requires_grad=True)
        for tokens, n in ((3, 2), (5, 1), (5, 1))
    )

    more = (None,) if form is CausalAttentionInParts else ()
    assert torch.autograd.gradcheck(form.apply, (q, k, v, *more))


def test_late_queries_in_half_precision_stay_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_BLOCKED_TOKENS", 0)
    q, k, v = (torch.randn(2, tokens, n, 16) for tokens, n in ((100, 4), (300, 2), (300, 2)))
    half = causal_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()).float()

    assert (half - causal_attention(q, k, v)).norm() < 0.02 * half.norm()


def test_parts_of_the_keys_join_in_any_order() -> None:
    q, k, v = (torch.randn(1, 12, 2, 4, dtype=torch.float64) for _ in range(3))
    parts = [slice(0, 5), slice(5, 6), slice(6, 12)]
    whole, whole_lse, _ = attention_with_lse(q, k, v, causal=False)

    for order in (parts, parts[::-1]):
        out, lse, _ = attention_with_lse(q, k[:, order[0]], v[:, order[0]], causal=False)
        for part in order[1:]:
            merge_partial_attention(
                out, lse, *attention_with_lse(q, k[:, part], v[:, part], causal=False)[:2]
            )
        assert torch.allclose(out, whole, rtol=1e-12)
        assert torch.allclose(lse, whole_lse, rtol=1e-12)


def test_the_kernels_of_a_gpu_are_called_as_they_want() -> None:
    q, k, v = (torch.empty(2, 64, n, 16, dtype=torch.bfloat16, device="meta") for n in (4, 2, 2))

    out, lse, rest = attention_with_lse(q, k, v, causal=True)
    gradients = partial_attention_backward(out, q, k, v, out, lse, *rest, causal=True)

    assert (out.shape, lse.shape) == (q.shape, (2, 4, 64))
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_a_gpu_attends_to_parts_in_half_precision_only() -> None:
    q = torch.empty(2, 64, 4, 16, device="meta")

    with pytest.raises(ValueError, match="bf16 or fp16"):
        attention_with_lse(q, q, q, causal=True)


@pytest.mark.parametrize(
    ("tokens", "causal", "name"),
    [(256, True, "blocked"), (2048, True, "flash_attention"), (64, False, "math")],
)
def test_the_kernel_of_a_training_has_a_name(tokens: int, causal: bool, name: str) -> None:
    shape = AttentionShape(tokens, heads=4, kv_heads=2, width=16, causal=causal)

    assert attention_kernel(shape, torch.float32, torch.device("cpu")) == name


# Both are PyTorch's own; the second comes where other tests have imported distutils before.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*istutils:UserWarning")
def test_inductor_takes_grouped_heads_for_no_pattern_of_its_own() -> None:
    """It would, in an evaluation, for attention whose heads share no keys, and then fail."""
    q, k, v = torch.randn(2, 32, 8, 4), torch.randn(2, 32, 2, 4), torch.randn(2, 32, 2, 4)

    with torch.no_grad():
        compiled = torch.compile(causal_attention)(q, k, v)

        torch.testing.assert_close(compiled, causal_attention(q, k, v))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*istutils:UserWarning")
@pytest.mark.parametrize(("queries", "keys", "kv_heads"), [(130, 130, 4), (100, 130, 2)])
def test_compiled_blocks_give_what_they_give_uncompiled(
    queries: int, keys: int, kv_heads: int
) -> None:
    """Several blocks of queries, of which the last one is shorter."""
    q, k, v = (
        torch.randn(2, n, heads, 8, requires_grad=True)
        for n, heads in ((queries, 4), (keys, kv_heads), (keys, kv_heads))
    )
    above = torch.randn(q.shape)
    ways = torch.compile(BlockedAttention.apply, fullgraph=True), BlockedAttention.apply
    compiled, plain = (
        [out := way(q, k, v), *torch.autograd.grad(out, (q, k, v), above)] for way in ways
    )

    torch.testing.assert_close(compiled, plain)
