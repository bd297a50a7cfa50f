"""Matrices in the compute dtype, made once a step, whose gradients go straight to the parameters.

Without them every product casts its fp32 weight in every micro-batch, and autograd casts the
weight's gradient back before it adds it: 26 bytes a parameter and micro-batch instead of 12, which
on a GPU is a few percent of the step. The numbers are the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from paceline.trainer.model.decoder import Decoder
from paceline.trainer.model.layers import Linear, VocabParallelEmbedding
from paceline.trainer.model.network import Network

Layer = Linear | VocabParallelEmbedding


class ComputeCopies:
    """Copies of the weights of linear layers and of the head, in the dtype that they compute in."""

    def __init__(self, parts: Iterable[Network]) -> None:
        """A layer that computes in its weight's own dtype gets none."""
        self.weights: list[Tensor] = []
        self.copies: list[Tensor] = []
        for part in parts:
            for layer in layers_with_copies(part):
                if layer.weight.dtype != part.setting.dtype:
                    self._add(layer, part.setting.dtype)

    def _add(self, layer: Layer, dtype: torch.dtype) -> None:
        weight = layer.weight
        copy = weight.detach().to(dtype).requires_grad_(weight.requires_grad)
        if weight.requires_grad:
            copy.register_post_accumulate_grad_hook(adder_to(weight))
        layer.compute_weight = copy
        self.weights.append(weight)
        self.copies.append(copy.detach())

    def refresh(self) -> None:
        """Take over the weights as they are now."""
        if self.copies:
            weights = [weight.detach() for weight in self.weights]  # they may have moved: ZeRO 1
            torch._foreach_copy_(self.copies, weights)  # pyright: ignore[reportPrivateImportUsage]


def layers_with_copies(part: Network) -> list[Layer]:
    """Linear layers, and the embedding where it is the head's table as well."""
    layers: list[Layer] = [module for module in part.modules() if isinstance(module, Linear)]
    if isinstance(part, Decoder) and part.part.last and part.head is None:
        layers.append(part.head_table)
    return layers


def adder_to(weight: Tensor) -> Callable[[Tensor], None]:
    """What adds a copy's gradient to the weight's, in the weight's dtype, and frees it."""

    def add(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        assert gradient is not None, "autograd calls this once a gradient is there"
        if weight.grad is None:
            weight.grad = gradient.to(weight.dtype)
        else:
            weight.grad.add_(gradient)

    return add
