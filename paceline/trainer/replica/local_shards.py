"""ZeRO 2 and 3: the optimizer updates this rank's shards as plain tensors.

Of DTensors PyTorch works out, for every operation on a list of them, how each may lie on the mesh.
The more axes, the longer: seconds of the first step, of a small model over three axes as well.
AdamW needs none of it, since it treats every element alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from paceline.trainer.parallel.tensor import local


class LocalShards:
    """What an optimizer updates in place of parameters that are spread over ranks."""

    @torch.no_grad()
    def __init__(self, trained: Iterable[nn.Parameter]) -> None:
        self.weights = {parameter: nn.Parameter(local(parameter)) for parameter in trained}
        """By parameter, the same memory as this rank's shard of it."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer of the shards their gradients."""
        optimizer.register_step_pre_hook(lambda *_: self._take_gradients())
        optimizer.register_step_post_hook(lambda *_: self._drop_gradients())

    @torch.no_grad()
    def _take_gradients(self) -> None:
        for parameter, weight in self.weights.items():
            assert parameter.grad is not None, "a missing gradient has been told already"
            # FSDP moves a shard to fill it up to an equal length: taken as it is now.
            weight.data = local(parameter)
            weight.grad = local(parameter.grad)

    def _drop_gradients(self) -> None:
        for weight in self.weights.values():
            weight.grad = None
