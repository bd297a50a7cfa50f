"""Layers with parameters, and how tensor ranks hold these: the names are Megatron-Core's.

A column-parallel layer has shards of its outputs and takes whole inputs, a row-parallel one has
shards of its inputs, so its outputs are summed. Of an adapter B A, the matrix on the
side that is cut is cut alike; the other one is whole, and sees a rank's share alone.

Activations are written in the forms that compile well.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.trainer.config import LoraConfig
from paceline.trainer.model.dropout import drop
from paceline.trainer.model.loss import head_loss
from paceline.trainer.model.low_precision import Product
from paceline.trainer.model_config import ModelConfig
from paceline.trainer.parallel.tensor import (
    PER_HEAD,
    REPLICATED,
    ParamPlan,
    TensorParallel,
    TpPlan,
    local,
)


class Linear(nn.Linear):
    """A linear layer that computes in its input's dtype, with a low-rank adapter if it has one."""

    tp_plan: TpPlan = REPLICATED

    def __init__(
        self, in_features: int, out_features: int, bias: bool, lora: LoraConfig | None = None
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.lora = lora
        self.lora_a = nn.Parameter(torch.empty(lora.rank, in_features)) if lora else None
        self.lora_b = nn.Parameter(torch.empty(out_features, lora.rank)) if lora else None
        self.low_precision: Product | None = None
        """The layer's own product, where `use_low_precision` has set one."""
        self.compute_weight: Tensor | None = None
        """The weight in the compute dtype, where `ComputeCopies` keeps one between steps."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        bias = None if self.bias is None else local(self.bias).to(input.dtype)
        return self.product(input, bias)

    def product(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        """input W^T + bias, and (alpha / rank) input A^T B^T (Hu et al., arXiv:2106.09685)."""
        weight = self.compute_weight
        weight = local(self.weight).to(input.dtype) if weight is None else weight
        if self.low_precision is not None:
            out = self.low_precision(input, weight)  # (..., out)
            out = out if bias is None else out + bias
        else:
            out = functional.linear(input, weight, bias)
        if self.lora is None or self.lora_a is None or self.lora_b is None:
            return out
        drops = self.lora.dropout > 0 and self.training
        inner = drop(input, self.lora.dropout) if drops else input
        inner = functional.linear(inner, local(self.lora_a).to(input.dtype))  # (..., rank)
        update = functional.linear(inner, local(self.lora_b).to(input.dtype))  # (..., out)
        return torch.add(out, update, alpha=self.lora.alpha / self.lora.rank)


class ColumnParallelLinear(Linear):
    """A linear layer whose outputs are cut over tensor ranks."""

    tp_plan: TpPlan = {
        "weight": ParamPlan(shard_dim=0),
        "bias": ParamPlan(shard_dim=0),
        "lora_a": ParamPlan(partial_grad=True),
        "lora_b": ParamPlan(shard_dim=0),
    }


class RowParallelLinear(Linear):
    """A linear layer whose inputs are cut over tensor ranks; the bias comes after the sum.

    An adapter is linear as well, so its share goes into the same sum.
    """

    tp_plan: TpPlan = {
        "weight": ParamPlan(shard_dim=1),
        "bias": ParamPlan(),
        "lora_a": ParamPlan(shard_dim=1),
        "lora_b": ParamPlan(partial_grad=True),
    }

    def __init__(
        self,
        tp: TensorParallel,
        in_features: int,
        out_features: int,
        bias: bool,
        lora: LoraConfig | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, lora)
        self.tp = tp

    def forward(self, input: Tensor) -> Tensor:
        """(B, T, in) -> (B, t, out)."""
        if self.tp.axis.size == 1:
            return super().forward(input)
        out = self.tp.reduce_output(self.product(input))
        return out if self.bias is None else out + local(self.bias).to(out.dtype)


class PositionEmbedding(nn.Embedding):
    """A vector for each position."""

    tp_plan: TpPlan = REPLICATED

    def forward(self, input: Tensor) -> Tensor:
        """(t,) positions -> (t, H)."""
        return functional.embedding(input, local(self.weight))


class VocabParallelEmbedding(nn.Embedding):
    """Token vectors in the compute dtype; tensor ranks share the vocabulary."""

    tp_plan: TpPlan = {"weight": ParamPlan(shard_dim=0)}

    def __init__(self, tp: TensorParallel, dtype: torch.dtype, vocab: int, width: int) -> None:
        super().__init__(vocab, width)
        self.tp, self.dtype = tp, dtype
        self.compute_weight: Tensor | None = None
        """As a `Linear`'s, for a head that has this table."""

    def forward(self, input: Tensor) -> Tensor:
        """(B, T) tokens -> (B, t, E)."""
        table = local(self.weight)
        axis = self.tp.axis
        if axis.size == 1:
            return functional.embedding(input, table).to(self.dtype)
        index = input - axis.index * table.shape[0]
        inside = (index >= 0) & (index < table.shape[0])
        vectors = functional.embedding(index.clamp(0, table.shape[0] - 1), table)
        # One rank alone has a token's row, so the sum is exact in any dtype.
        return self.tp.reduce_output((vectors * inside.unsqueeze(-1)).to(self.dtype))


class Head(ColumnParallelLinear):
    """The vocabulary's rows, of which tensor ranks hold parts, and the loss that they give."""

    def forward(self, input: Tensor, **loss: Any) -> Tensor:
        """(tokens, E) -> the scaled loss; see `head_loss`."""
        return head_loss(self, input, **loss)


def gelu_tanh(x: Tensor) -> Tensor:
    """x / 2 (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks, arXiv:1606.08415).

    Inductor's tanh takes longer on a CPU than all else of the function, so there it is compiled as
    the equal x sigmoid(2 u).
    """
    if x.device.type == "cpu" and torch.compiler.is_compiling():
        return x * torch.sigmoid(x * (2 * sqrt(2 / pi)) * (1 + 0.044715 * x * x))
    return functional.gelu(x, approximate="tanh")


class Relu(torch.autograd.Function):
    """max(x, 0), whose gradient is found by the output, which the next product keeps anyway.

    Compiled from PyTorch's own, a block keeps a byte for each element as well, and on a CPU those
    bytes are written one by one (PyTorch 2.13). It would keep them of a comparison here as well, so
    the gradient is a product: where the output is 0, one that has overflowed becomes NaN, not 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clamp_min(0)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        return grad_output * out.sign()


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    if x.device.type == "cpu" and torch.compiler.is_compiling():
        return Relu.apply(x)  # type: ignore[no-any-return]
    return functional.relu(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
}


SUMMED_NARROW = ("cpu",)
"""Devices whose kernel sums the gradients of weight and bias in 16 bits."""


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, in its input's dtype."""

    tp_plan: TpPlan = REPLICATED

    def __init__(self, model: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        width = width or model.hidden_size
        self.eps, self.zero_centered = model.norm_eps, model.norm_zero_centered
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if model.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        weight = local(self.weight)
        weight = (1 + weight if self.zero_centered else weight).to(x.dtype)
        if self.bias is None:
            return functional.rms_norm(x, weight.shape, weight, self.eps)
        bias = local(self.bias).to(x.dtype)
        if x.device.type in SUMMED_NARROW and x.dtype.itemsize == 2:
            # 10 % wrong over 8,192 tokens, 70 % over 65,536 (PyTorch 2.13).
            return torch.addcmul(bias, functional.layer_norm(x, weight.shape, eps=self.eps), weight)
        return functional.layer_norm(x, weight.shape, weight, bias, self.eps)


class QKNorm(Norm):
    """The norm of every head's queries, or of its keys, with one weight for all heads."""

    tp_plan: TpPlan = PER_HEAD

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model, model.head_dim)
