"""A plain loop over diffusers' Flux that waits for its turn: _diffusers_in_turns.py FILE BLOCK.

Its batch is drawn once, before the first step, so that its time is the training's alone; the native
trainer draws a new one for every step meanwhile.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from _turns import BlockTimer
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

from paceline.core.mmdit import MMDiTShape
from paceline.trainer.config import parse_config
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.measure.machine import keep_freed_memory
from paceline.trainer.parallel.mesh import ALONE
from tests.trainer.flux_peer import peer_settings, peer_velocity


def steps(settings: dict[str, Any]) -> Iterator[None]:
    """A training on one process without end, one step at a time."""
    training = settings["training"]
    keep_freed_memory()
    torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision(training["matmul_precision"])
    torch.manual_seed(training["seed"])
    fields = {name: settings["model"][name] for name in MMDiTShape.model_fields}
    shape = MMDiTShape.model_validate(fields)
    model = FluxTransformer2DModel(**peer_settings(shape))
    assert sum(p.numel() for p in model.parameters()) == settings["expected_parameters"]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=training["lr"],
        betas=tuple(training["betas"]),
        eps=training["eps"],
        weight_decay=training["weight_decay"],
        fused=True,
    )
    corpus = load_corpus(parse_config(settings))
    indices = [*range(training["global_batch"])]
    noisy, velocity, *conditions = (x.float() for x in corpus.collate(indices, ALONE))
    bf16 = training["dtype"] == "bf16"
    gc.collect()
    gc.disable()  # as the native trainer does between steps
    while True:
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            predicted = peer_velocity(model, shape, noisy, *conditions)
        loss = torch.nn.functional.mse_loss(predicted.float(), velocity)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        yield


def main(path: str, block: int) -> None:
    """Train until nobody wants another block."""
    turn, training = BlockTimer(block), steps(json.loads(Path(path).read_text()))
    while True:
        turn.step()
        next(training)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
