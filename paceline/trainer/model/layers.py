"""Layers with parameters and how tensor ranks shard them; the names are Megatron-Core's.

A column-parallel layer holds a shard of its outputs and takes whole inputs. A row-parallel layer
holds a shard of its inputs, so its outputs are summed over the ranks. The matrix of a LoRA adapter
B A on the sharded side is sharded in the same way; the other one is replicated and sees only a
rank's share of the activations.

Activation functions are written in the forms that compile well.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.trainer.config import LoraConfig
from paceline.trainer.model.dropout import dropout
from paceline.trainer.model.loss import head_loss
from paceline.trainer.model.low_precision import Gemm
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
    """A linear layer that computes in its input's dtype, with an optional LoRA adapter."""

    tp_plan: TpPlan = REPLICATED

    def __init__(
        self, in_features: int, out_features: int, bias: bool, lora: LoraConfig | None = None
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.lora = lora
        self.lora_a = nn.Parameter(torch.empty(lora.rank, in_features)) if lora else None
        self.lora_b = nn.Parameter(torch.empty(out_features, lora.rank)) if lora else None
        self.low_precision: Gemm | None = None
        """The low-precision GEMM of this layer, set by `use_low_precision`."""
        self.compute_weight: Tensor | None = None
        """Copy of the weight in the compute dtype, set by `ComputeCopies`."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        bias = None if self.bias is None else local(self.bias).to(input.dtype)
        return self.matmul(input, bias)

    def matmul(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return input W^T + bias + (alpha / rank) input A^T B^T (Hu et al., arXiv:2106.09685)."""
        weight = self.compute_weight
        weight = local(self.weight).to(input.dtype) if weight is None else weight
        if self.low_precision is not None:
            out = self.low_precision(input, weight)  # (..., out)
            out = out if bias is None else out + bias
        else:
            out = functional.linear(input, weight, bias)
        if self.lora is None or self.lora_a is None or self.lora_b is None:
            return out
        use_dropout = self.lora.dropout > 0 and self.training
        inner = dropout(input, self.lora.dropout) if use_dropout else input
        inner = functional.linear(inner, local(self.lora_a).to(input.dtype))  # (..., rank)
        update = functional.linear(inner, local(self.lora_b).to(input.dtype))  # (..., out)
        return torch.add(out, update, alpha=self.lora.alpha / self.lora.rank)


class ColumnParallelLinear(Linear):
    """A linear layer whose outputs are sharded over tensor ranks."""

    tp_plan: TpPlan = {
        "weight": ParamPlan(shard_dim=0),
        "bias": ParamPlan(shard_dim=0),
        "lora_a": ParamPlan(partial_grad=True),
        "lora_b": ParamPlan(shard_dim=0),
    }


class RowParallelLinear(Linear):
    """A linear layer whose inputs are sharded over tensor ranks; the bias is added after the sum.

    A LoRA adapter is linear as well, so its partial result is part of the same sum.
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
        """Map (B, T, in / tp) to (B, t, out)."""
        if self.tp.axis.size == 1:
            return super().forward(input)
        out = self.tp.reduce_output(self.matmul(input))  # (B, t, out)
        return out if self.bias is None else out + local(self.bias).to(out.dtype)


class PositionEmbedding(nn.Embedding):
    """Learned absolute position embeddings."""

    tp_plan: TpPlan = REPLICATED

    def forward(self, input: Tensor) -> Tensor:
        """Map (t,) or (B, t) positions to vectors of width H."""
        return functional.embedding(input, local(self.weight))


class VocabParallelEmbedding(nn.Embedding):
    """Token embeddings in the compute dtype, sharded by vocabulary over tensor ranks."""

    tp_plan: TpPlan = {"weight": ParamPlan(shard_dim=0)}

    def __init__(self, tp: TensorParallel, dtype: torch.dtype, vocab: int, width: int) -> None:
        super().__init__(vocab, width)
        self.tp, self.dtype = tp, dtype
        self.compute_weight: Tensor | None = None
        """Copy of the weight in the compute dtype, for a head that is tied to this table."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (B, T) tokens to (B, t, E)."""
        table = local(self.weight)
        axis = self.tp.axis
        if axis.size == 1:
            return functional.embedding(input, table).to(self.dtype)
        index = input - axis.index * table.shape[0]  # (B, T), a row of this shard or outside it
        inside = (index >= 0) & (index < table.shape[0])
        vectors = functional.embedding(index.clamp(0, table.shape[0] - 1), table)
        # Only one rank holds a token's row, so the sum is exact in any dtype.
        return self.tp.reduce_output((vectors * inside.unsqueeze(-1)).to(self.dtype))


class Head(ColumnParallelLinear):
    """The output projection to the vocabulary together with its loss."""

    def forward(self, input: Tensor, **loss: Any) -> Tensor:
        """Return the scaled loss of (tokens, E) hidden states; see `head_loss`."""
        return head_loss(self, input, **loss)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return x / 2 (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715 x^3) (arXiv:1606.08415).

    On a CPU, Inductor's tanh takes longer than the rest of the function. There it is compiled as
    x sigmoid(2 u), which is equal.
    """
    if x.device.type == "cpu" and torch.compiler.is_compiling():
        return x * torch.sigmoid(x * (2 * sqrt(2 / pi)) * (1 + 0.044715 * x * x))
    return functional.gelu(x, approximate="tanh")


class Relu(torch.autograd.Function):
    """max(x, 0), whose backward pass uses the output, which the next GEMM saves anyway.

    Compiled from PyTorch's own relu, a block also saves a byte for each element, and on a CPU
    those bytes are written one by one (PyTorch 2.13). A comparison would be saved in the same way,
    so the gradient is a multiplication: an overflowed gradient becomes NaN, not 0, where the output
    is 0.
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
    """Return max(x, 0)."""
    if x.device.type == "cpu" and torch.compiler.is_compiling():
        return Relu.apply(x)  # type: ignore[no-any-return]
    return functional.relu(x)


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x) (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return x * torch.sigmoid(QUICK_GELU_RATE * x)


QUICK_GELU_RATE = 1.702
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": relu,
}


def mlp_activation(model: ModelConfig) -> Callable[..., Tensor]:
    """Return the function of an MLP's first GEMMs: of (gate, up), or of one without a gate."""
    activation = ACTIVATIONS[model.activation]
    if not model.gated_ffn:
        return activation
    limit, offset = model.activation_limit, model.up_offset

    def activate(gate: Tensor, up: Tensor) -> Tensor:
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return activation(gate) * (up + offset if offset else up)

    return activate


HALF_GRAD_SUM_DEVICES = ("cpu",)
"""Devices whose LayerNorm kernel sums the gradients of weight and bias in 16 bits."""


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, computed in the input's dtype."""

    tp_plan: TpPlan = REPLICATED

    def __init__(self, model: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        width = width or model.hidden_size
        self.eps, self.zero_centered = model.norm_eps, model.norm_zero_centered
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if model.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (..., H)."""
        weight = local(self.weight)
        weight = (1 + weight if self.zero_centered else weight).to(x.dtype)
        if self.bias is None:
            return functional.rms_norm(x, weight.shape, weight, self.eps)
        bias = local(self.bias).to(x.dtype)
        if x.device.type in HALF_GRAD_SUM_DEVICES and x.dtype.itemsize == 2:
            # The kernel's sums are off by 10% over 8,192 tokens, 70% over 65,536 (PyTorch 2.13).
            return torch.addcmul(bias, functional.layer_norm(x, weight.shape, eps=self.eps), weight)
        return functional.layer_norm(x, weight.shape, weight, bias, self.eps)


class QKNorm(Norm):
    """A norm of each head's queries or keys, with one weight for all heads."""

    tp_plan: TpPlan = PER_HEAD

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model, model.head_dim)
