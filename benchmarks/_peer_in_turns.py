"""A plain loop over transformers or peft that waits for its turn: FILE BLOCK [compiled]."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from _plain_loop import plain_steps
from _turns import BlockTimer
from torch import nn

from tests.trainer import peers


def build(content: dict[str, Any]) -> nn.Module:
    """The peer as the native trainer has its model: frozen weights in the dtype of computing."""
    model = peers.build(content).train()
    if content["layout"]["recompute"] == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    if content["training"]["dtype"] == "bf16":
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def built_and_compiled(content: dict[str, Any]) -> nn.Module:
    """The same behind torch.compile, loss included."""
    return torch.compile(build(content))  # type: ignore[return-value]


def main(path: str, block: int, compiled: bool) -> None:
    """Train until nobody wants another block."""
    content = json.loads(Path(path).read_text())
    turn = BlockTimer(block)
    make = built_and_compiled if compiled else build
    steps = plain_steps(content, make, lambda model, ids: model(input_ids=ids, labels=ids).loss)
    while True:
        turn.step()
        next(steps)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["compiled"])
