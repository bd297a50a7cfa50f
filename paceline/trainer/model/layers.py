"""Layers with parameters, and how tensor ranks hold these: the names are Megatron-Core's.

A column-parallel layer has shards of its outputs and takes whole inputs, a row-parallel one has
shards of its inputs, so its outputs are summed. Of an adapter B A, the matrix on the
side that is cut is cut alike; the other one is whole, and sees a rank's share alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.trainer.config import LoraConfig
from paceline.trainer.model.dropout import drop
from paceline.trainer.model.loss import head_loss
from paceline.trainer.model.low_precision import Product
from paceline.trainer.parallel.tensor import (
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
            out = self.low_precision(input, weight)
            out = out if bias is None else out + bias
        else:
            out = functional.linear(input, weight, bias)
        if self.lora is None or self.lora_a is None or self.lora_b is None:
            return out
        drops = self.lora.dropout > 0 and self.training
        inner = drop(input, self.lora.dropout) if drops else input
        inner = functional.linear(inner, local(self.lora_a).to(input.dtype))
        update = functional.linear(inner, local(self.lora_b).to(input.dtype))
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
