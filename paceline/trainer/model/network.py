"""What the trainer asks of a model, whatever it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

INIT_STD = 0.02


class Network(nn.Module):
    """A model, or a pipeline stage of it, that returns its scaled loss.

    Parameters are named as in the whole model, and the module that has them says in its `tp_plan`
    how tensor ranks hold them. `blocks` are what is compiled, recomputed and gathered one by one.
    """

    model: Any
    """The configuration it was made from."""
    setting: Any
    """How it computes: `model.Setting`, which this module lies below."""
    blocks: nn.ModuleDict
    compiled: bool = False
    """Whether its blocks are compiled, and with them what is done to logits."""
    scale: float = 1.0
    """What the summed loss is multiplied with, set before every step."""
    sample_weights: Tensor | None = None
    """(B,) what each target of a sample counts in an evaluation; None where all count the same."""

    @property
    def tied_copy(self) -> str | None:
        """The parameter that is another stage's as well, and only copied here."""
        return None

    def make_tables(self, device: torch.device) -> None:
        """Compute what belongs to this rank's positions, if anything, once before training."""

    def fill(self, name: str, whole: Tensor, generator: torch.Generator) -> None:
        """Initial values of a whole parameter: matrices from N(0, 0.02), norm weights 1, biases 0.

        Adapters begin without effect: the first matrix uniform in +-1/sqrt(in), the second 0.
        """
        *_, layer, kind = name.split(".")
        if layer.endswith("norm") and kind == "weight":
            whole.fill_(1)
        elif kind in ("bias", "lora_b"):
            whole.zero_()
        elif kind == "lora_a":
            bound = whole.shape[1] ** -0.5
            whole.uniform_(-bound, bound, generator=generator)
        else:
            whole.normal_(0, INIT_STD, generator=generator)
