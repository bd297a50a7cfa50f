"""Cross-entropy of a language model's head without ever holding all logits."""

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
"""Most bytes of full-precision logits at a time: cache-sized on a CPU; on a GPU few passes over the
gradient of the head, which every chunk reads and writes whole."""

COMPILER = "inductor"

Scale = float | Tensor
"""A factor, or a scalar tensor that holds it."""


class ChunkedCrossEntropy(torch.autograd.Function):
    """scale x the sum over tokens of -log softmax(hidden @ weight.T)[target].

    hidden (tokens, width), weight (vocab, width), targets (tokens,) -> scalar in full precision.
    Softmax and loss are computed in fp32 (or wider) and the matrix products in hidden's dtype.
    Gradients are made chunk by chunk in the forward pass, while a chunk's logits are at hand, so
    `scale` must already hold everything that the caller would multiply the loss with: fp16
    gradients would vanish otherwise. With a `compute_weight`, which stands for a leaf `weight` in
    hidden's dtype, the weight's gradient is added to `weight.grad` right there, as it is without
    any factor: the loss must then be the root of the backward pass.

    Over a tensor-parallel axis of n ranks, weight is this rank's n-th of the vocabulary, and the
    gradient of hidden is this rank's part of a sum over the axis.
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
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        direct = compute_weight is not None and ctx.needs_input_grad[1]
        grad_weight = weight.grad if direct else None
        scale = scale.to(total) if isinstance(scale, Tensor) else scale
        most = chunk_rows(hidden.device.type, weight.shape[0], total.element_size())
        rows = even_rows(hidden.shape[0], most)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            loss, grad_logits = chunk(hidden[part], cast, targets[part], scale, wide, tp)
            total += loss
            torch.mm(grad_logits, cast, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                grad_weight = _add_product(grad_weight, grad_logits, hidden[part], wide)
        if direct:
            weight.grad, grad_weight = grad_weight, None
        kept = None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_hidden, kept)
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_hidden, grad_weight = ctx.saved_tensors
        # Reading the factor is free on a CPU and would stall a GPU's queue.
        if grad_output.device.type != "cpu" or grad_output.item() != 1:
            grad_hidden = grad_hidden * grad_output.to(grad_hidden.dtype)
            if grad_weight is not None:
                grad_weight = grad_weight * grad_output.to(grad_weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _add_product(
    total: Tensor | None, grad_logits: Tensor, hidden: Tensor, wide: torch.dtype
) -> Tensor:
    """`total` and this chunk's part of the head's gradient, in full precision as the parameter's.

    On a GPU the product itself gives full precision, which saves two passes over (vocab, width).
    """
    across = grad_logits.t()
    if hidden.is_cuda and wide == torch.float32 and hidden.dtype != wide:
        if total is None:
            return torch.mm(across, hidden, out_dtype=wide)
        return torch.addmm(total, across, hidden, out_dtype=wide, out=total)
    product = across @ hidden
    return product.to(wide) if total is None else total.add_(product)


def even_rows(tokens: int, most: int) -> int:
    """Tokens of a chunk, at most `most`: so many that all chunks are as even as can be."""
    chunks = max(1, -(-tokens // most))
    return max(1, -(-tokens // chunks))


def chunk_rows(device_type: str, vocab: int, element_bytes: int) -> int:
    """Tokens whose full-precision logits fill one chunk, at least 1."""
    return max(1, CHUNK_BYTES.get(device_type, CHUNK_BYTES["cpu"]) // (vocab * element_bytes))


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Scale,
    tp: MeshAxis = ALONE,
    counts: Tensor | None = None,
    compute_weight: Tensor | None = None,
    compiled: bool = False,
) -> Tensor:
    """scale x summed cross-entropy of (tokens, width) hidden states; IGNORE_INDEX adds nothing.

    `compute_weight` is a copy of the weight in the states' dtype, if there is one. `compiled` fuses
    what is done to logits. Without gradients each token may count differently: (tokens,) `counts`.
    """
    if not torch.is_grad_enabled():
        return _without_gradients(hidden, weight, targets, tp, counts) * scale
    assert counts is None, "tokens count differently only where nothing is trained"
    if compute_weight is not None:
        compute_weight = compute_weight.detach()
    return ChunkedCrossEntropy.apply(  # type: ignore[no-any-return]
        hidden, weight, targets, scale, tp, compute_weight, compiled
    )


def head_loss(table: Any, hidden: Tensor, **loss: Any) -> Tensor:
    """`chunked_cross_entropy` by the weight of a head, or of an embedding that is one."""
    copy = table.compute_weight
    return chunked_cross_entropy(hidden, local(table.weight), compute_weight=copy, **loss)


def _without_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, tp: MeshAxis, counts: Tensor | None
) -> Tensor:
    """The summed cross-entropy alone, summed as `ChunkedCrossEntropy` does."""
    cast = weight.to(hidden.dtype)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    rows = chunk_rows(hidden.device.type, weight.shape[0], total.element_size())
    worth = None if counts is None else counts.to(wide).split(rows)
    for i, (part, of_part) in enumerate(zip(hidden.split(rows), targets.split(rows), strict=True)):
        logits = functional.linear(part, cast).to(wide)
        real = of_part != IGNORE_INDEX
        if worth is not None:
            losses = _losses(logits, of_part, tp)
            total += (losses * real * worth[i]).sum()
        elif tp.size == 1:
            total += functional.cross_entropy(
                logits, of_part, ignore_index=IGNORE_INDEX, reduction="sum"
            )
        else:
            total += (_losses(logits, of_part, tp) * real).sum()
    return total


def _losses(logits: Tensor, targets: Tensor, tp: MeshAxis) -> Tensor:
    """(tokens,) losses, of which those of ignored targets mean nothing."""
    if tp.size > 1:
        return _sliced(logits, targets, tp)[0].squeeze(1)
    return functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: Scale, wide: torch.dtype, tp: MeshAxis
) -> tuple[Tensor, Tensor]:
    """Summed loss of some tokens, and its gradient by their logits in hidden's dtype."""
    logits = functional.linear(hidden, weight)  # (tokens, vocab / tp)
    real = (targets != IGNORE_INDEX).to(wide).unsqueeze(1)  # (tokens, 1)
    if tp.size == 1:
        index = targets.clamp_min(0).unsqueeze(1)
        log_p = torch.log_softmax(logits, dim=-1, dtype=wide)  # (tokens, vocab)
        loss = -(log_p.gather(1, index) * real).sum()
        grad = log_p.exp_()  # (tokens, vocab), in place
        grad.scatter_add_(1, index, grad.new_full(index.shape, -1))
    else:
        losses, grad = _sliced(logits.to(wide), targets, tp)  # (tokens, 1), (tokens, vocab / tp)
        loss = (losses * real).sum()
    factor = real * scale
    if wide == hidden.dtype:
        return loss, grad.mul_(factor)
    return loss, torch.mul(grad, factor, out=logits)


@cache
def compiled_chunk() -> Callable[..., tuple[Tensor, Tensor]]:
    """`_chunk` for whole vocabularies, whose softmax reads the logits twice and writes them once.

    Anew it is compiled for every size of the vocabulary and of chunks.
    """
    gradient = torch.compile(_logits_gradient, backend=COMPILER)

    def chunk(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Scale,
        wide: torch.dtype,
        _: MeshAxis,
    ) -> tuple[Tensor, Tensor]:
        factor = (targets != IGNORE_INDEX).to(wide) * scale
        return gradient(functional.linear(hidden, weight), targets, factor, wide)

    return chunk


def _logits_gradient(
    logits: Tensor, targets: Tensor, factor: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `_chunk` of (rows, vocab) logits; (rows,) `factor` is 0 for ignored targets."""
    x = logits.to(wide)
    index = targets.clamp_min(0).unsqueeze(1)
    log_sum = torch.logsumexp(x, dim=1, keepdim=True)  # (rows, 1)
    losses = (log_sum - x.gather(1, index)).squeeze(1)  # (rows,)
    hit = torch.arange(x.shape[1], device=x.device).unsqueeze(0) == index
    grad = (torch.exp(x - log_sum) - hit.to(wide)) * factor.unsqueeze(1)
    return torch.where(targets == IGNORE_INDEX, 0.0, losses).sum(), grad.to(logits.dtype)


def _sliced(logits: Tensor, targets: Tensor, tp: MeshAxis) -> tuple[Tensor, Tensor]:
    """(tokens, 1) losses and their gradients by this slice of the logits, which are overwritten.

    Every slice is summed relative to its own largest logit, so that one exchange of three numbers
    a token is enough.
    """
    # (tokens, 1), as rows of this slice
    local = (targets - tp.index * logits.shape[1]).unsqueeze(1)
    inside = ((local >= 0) & (local < logits.shape[1])).to(logits.dtype)
    index = local.clamp(0, logits.shape[1] - 1)
    at_target = logits.gather(1, index) * inside  # (tokens, 1), 0 on all ranks but one
    largest = logits.amax(dim=1, keepdim=True)  # (tokens, 1)
    grad = logits.sub_(largest).exp_()
    mine = torch.cat([largest, grad.sum(dim=1, keepdim=True), at_target], dim=1)  # (tokens, 3)
    all_ranks = all_gather_into(mine.new_empty(tp.size, *mine.shape).flatten(0, 1), mine, tp.group)
    # (tp, tokens, 1)
    largests, sums, at_targets = all_ranks.view(tp.size, *mine.shape).split(1, dim=2)
    log_sum = torch.logsumexp(largests + sums.log(), dim=0)  # (tokens, 1)
    losses = log_sum - at_targets.sum(dim=0)
    grad.mul_(torch.exp(largest - log_sum)).scatter_add_(1, index, -inside)
    return losses, grad
