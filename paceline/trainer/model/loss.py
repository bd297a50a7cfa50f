"""Cross-entropy of a language model's head without materializing all logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.trainer.parallel.collectives import all_gather_into
from paceline.trainer.parallel.mesh import ALONE, MeshAxis
from paceline.trainer.parallel.tensor import local

IGNORE_INDEX = -100
CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 2**30}
"""Maximum bytes of full-precision logits per chunk. On a CPU a chunk fits the cache. On a GPU few
chunks are better, because each reads and writes the whole gradient of the head."""

COMPILER = "inductor"

Scale = float | Tensor
"""A number or a scalar tensor."""


class ChunkedCrossEntropy(torch.autograd.Function):
    """scale x the sum over tokens of -log softmax(hidden @ weight.T)[target].

    hidden (tokens, H), weight (V, H), targets (tokens,) -> scalar in full precision. Softmax and
    loss are computed in fp32 (or wider), the GEMMs in hidden's dtype.

    Gradients are computed chunk by chunk in the forward pass, while a chunk's logits are in memory.
    `scale` must therefore include every factor that the caller would apply to the loss, or fp16
    gradients would underflow. With a `compute_weight` (a copy of the leaf `weight` in hidden's
    dtype), the weight's gradient is added to `weight.grad` in the forward pass, so the loss must be
    the root of the backward pass.

    Over a tensor-parallel axis of n ranks, weight is this rank's shard (V / n, H), and the gradient
    of hidden is this rank's part of a sum over the axis.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Scale,
        tp: MeshAxis,
        compute_weight: Tensor | None,
        compiled: bool,
    ) -> Tensor:
        cast = weight.to(hidden.dtype) if compute_weight is None else compute_weight
        chunk = compiled_chunk() if compiled and tp.size == 1 else _chunk
        grad_hidden = torch.empty_like(hidden)
        acc_dtype = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=acc_dtype, device=hidden.device)
        direct = compute_weight is not None and ctx.needs_input_grad[1]
        grad_weight = weight.grad if direct else None
        scale = scale.to(total) if isinstance(scale, Tensor) else scale
        limit = max_chunk_tokens(hidden.device.type, weight.shape[0], total.element_size())
        rows = balanced_chunk_tokens(hidden.shape[0], limit)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            loss, grad_logits = chunk(hidden[part], cast, targets[part], scale, acc_dtype, tp)
            total += loss
            torch.mm(grad_logits, cast, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                grad_weight = _accumulate_head_grad(
                    grad_weight, grad_logits, hidden[part], acc_dtype
                )
        if direct:
            weight.grad, grad_weight = grad_weight, None
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_hidden, grad_weight = ctx.saved_tensors
        # Reading the factor costs nothing on a CPU but would synchronize a GPU.
        if grad_output.device.type != "cpu" or grad_output.item() != 1:
            grad_hidden = grad_hidden * grad_output.to(grad_hidden.dtype)
            if grad_weight is not None:
                grad_weight = grad_weight * grad_output.to(grad_weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _accumulate_head_grad(
    total: Tensor | None, grad_logits: Tensor, hidden: Tensor, acc_dtype: torch.dtype
) -> Tensor:
    """Add this chunk's gradient of the head's weight (V, H) to `total`, in full precision.

    On a GPU the GEMM itself writes full precision, which saves two passes over (V, H).
    """
    grad_t = grad_logits.t()  # (V, tokens)
    if hidden.is_cuda and acc_dtype == torch.float32 and hidden.dtype != acc_dtype:
        if total is None:
            return torch.mm(grad_t, hidden, out_dtype=acc_dtype)
        return torch.addmm(total, grad_t, hidden, out_dtype=acc_dtype, out=total)
    grad = grad_t @ hidden
    return grad.to(acc_dtype) if total is None else total.add_(grad)


def balanced_chunk_tokens(tokens: int, max_tokens: int) -> int:
    """Return the tokens per chunk, at most `max_tokens`, that make the chunks equally long."""
    chunks = max(1, -(-tokens // max_tokens))
    return max(1, -(-tokens // chunks))


def max_chunk_tokens(device_type: str, vocab: int, element_bytes: int) -> int:
    """Return the number of tokens whose full-precision logits fill one chunk, at least 1."""
    return max(1, CHUNK_BYTES.get(device_type, CHUNK_BYTES["cpu"]) // (vocab * element_bytes))


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Scale,
    tp: MeshAxis = ALONE,
    token_weights: Tensor | None = None,
    compute_weight: Tensor | None = None,
    compiled: bool = False,
) -> Tensor:
    """Return scale x the summed cross-entropy of (tokens, H) hidden states.

    Targets that are IGNORE_INDEX add nothing. `compute_weight` is an optional copy of the weight in
    the hidden dtype. `compiled` fuses the operations on the logits. (tokens,) `token_weights` are
    supported only without gradients.
    """
    if not torch.is_grad_enabled():
        return _without_gradients(hidden, weight, targets, tp, token_weights) * scale
    assert token_weights is None, "token weights require torch.no_grad"
    if compute_weight is not None:
        compute_weight = compute_weight.detach()
    return ChunkedCrossEntropy.apply(  # type: ignore[no-any-return]
        hidden, weight, targets, scale, tp, compute_weight, compiled
    )


def head_loss(table: Any, hidden: Tensor, **loss: Any) -> Tensor:
    """Return `chunked_cross_entropy` with the weight of a head, or of a tied embedding."""
    copy = table.compute_weight
    return chunked_cross_entropy(hidden, local(table.weight), compute_weight=copy, **loss)


def _without_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, tp: MeshAxis, token_weights: Tensor | None
) -> Tensor:
    """Return the summed cross-entropy, added up in the order of `ChunkedCrossEntropy`."""
    cast = weight.to(hidden.dtype)
    acc_dtype = torch.promote_types(hidden.dtype, torch.float32)
    total = torch.zeros((), dtype=acc_dtype, device=hidden.device)
    rows = max_chunk_tokens(hidden.device.type, weight.shape[0], total.element_size())
    weights = None if token_weights is None else token_weights.to(acc_dtype).split(rows)
    for i, (part, labels) in enumerate(zip(hidden.split(rows), targets.split(rows), strict=True)):
        logits = functional.linear(part, cast).to(acc_dtype)  # (tokens, V / tp)
        valid = labels != IGNORE_INDEX
        if weights is not None:
            losses = _token_losses(logits, labels, tp)
            total += (losses * valid * weights[i]).sum()
        elif tp.size == 1:
            total += functional.cross_entropy(
                logits, labels, ignore_index=IGNORE_INDEX, reduction="sum"
            )
        else:
            total += (_token_losses(logits, labels, tp) * valid).sum()
    return total


def _token_losses(logits: Tensor, targets: Tensor, tp: MeshAxis) -> Tensor:
    """Return (tokens,) losses; those of ignored targets are arbitrary."""
    if tp.size > 1:
        return _vocab_parallel_loss(logits, targets, tp)[0].squeeze(1)
    return functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Scale,
    acc_dtype: torch.dtype,
    tp: MeshAxis,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of some tokens and the gradient of their logits in hidden's dtype."""
    logits = functional.linear(hidden, weight)  # (tokens, vocab / tp)
    valid = (targets != IGNORE_INDEX).to(acc_dtype).unsqueeze(1)  # (tokens, 1)
    if tp.size == 1:
        index = targets.clamp_min(0).unsqueeze(1)
        log_p = torch.log_softmax(logits, dim=-1, dtype=acc_dtype)  # (tokens, vocab)
        # d loss / d logits = softmax - onehot(target)
        loss = -(log_p.gather(1, index) * valid).sum()
        grad = log_p.exp_()  # (tokens, vocab), in place
        grad.scatter_add_(1, index, grad.new_full(index.shape, -1))
    else:
        losses, grad = _vocab_parallel_loss(
            logits.to(acc_dtype), targets, tp
        )  # (tokens, 1), (tokens, vocab / tp)
        loss = (losses * valid).sum()
    factor = valid * scale
    if acc_dtype == hidden.dtype:
        return loss, grad.mul_(factor)
    return loss, torch.mul(grad, factor, out=logits)


@cache
def compiled_chunk() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a compiled `_chunk` for unsharded vocabularies.

    Its softmax reads the logits twice and writes them once. It is recompiled for every size of the
    vocabulary and of the chunks.
    """
    gradient = torch.compile(_logits_gradient, backend=COMPILER)

    def chunk(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Scale,
        acc_dtype: torch.dtype,
        _: MeshAxis,
    ) -> tuple[Tensor, Tensor]:
        factor = (targets != IGNORE_INDEX).to(acc_dtype) * scale
        return gradient(functional.linear(hidden, weight), targets, factor, acc_dtype)

    return chunk


def _logits_gradient(
    logits: Tensor, targets: Tensor, factor: Tensor, acc_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the loss of (rows, V) logits and their gradient times `factor` (rows,)."""
    x = logits.to(acc_dtype)
    index = targets.clamp_min(0).unsqueeze(1)
    log_sum = torch.logsumexp(x, dim=1, keepdim=True)  # (rows, 1)
    losses = (log_sum - x.gather(1, index)).squeeze(1)  # (rows,)
    onehot = torch.arange(x.shape[1], device=x.device).unsqueeze(0) == index  # (rows, V)
    grad = (torch.exp(x - log_sum) - onehot.to(acc_dtype)) * factor.unsqueeze(1)
    return torch.where(targets == IGNORE_INDEX, 0.0, losses).sum(), grad.to(logits.dtype)


def _vocab_parallel_loss(logits: Tensor, targets: Tensor, tp: MeshAxis) -> tuple[Tensor, Tensor]:
    """Return (tokens, 1) losses and the gradient of this rank's logits, which are overwritten.

    Each rank sums exponentials relative to its own largest logit. One exchange of three numbers per
    token then gives the global log-sum-exp.
    """
    # (tokens, 1), as an index into this rank's shard
    local = (targets - tp.index * logits.shape[1]).unsqueeze(1)
    inside = ((local >= 0) & (local < logits.shape[1])).to(logits.dtype)
    index = local.clamp(0, logits.shape[1] - 1)
    at_target = logits.gather(1, index) * inside  # (tokens, 1), 0 on all ranks but one
    largest = logits.amax(dim=1, keepdim=True)  # (tokens, 1)
    grad = logits.sub_(largest).exp_()
    stats = torch.cat([largest, grad.sum(dim=1, keepdim=True), at_target], dim=1)  # (tokens, 3)
    all_stats = stats.new_empty(tp.size, *stats.shape)
    all_gather_into(all_stats.flatten(0, 1), stats, tp.group)
    # (tp, tokens, 1)
    largests, sums, at_targets = all_stats.split(1, dim=2)
    log_sum = torch.logsumexp(largests + sums.log(), dim=0)  # (tokens, 1)
    losses = log_sum - at_targets.sum(dim=0)
    grad.mul_(torch.exp(largest - log_sum)).scatter_add_(1, index, -inside)
    return losses, grad
