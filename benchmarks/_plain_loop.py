"""The loop of the plain trainers: everything that is not the model.

Reads the native trainer's own settings file and prints one JSON line with every step's seconds, so
that shape, dtype, batch, threads, optimizer, fp32 matrix-product setting, allocator setting and
garbage collection are the same on both sides.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.trainer.measure.machine import keep_freed_memory

Build = Callable[[dict[str, Any]], nn.Module]
"""A model from the settings."""
Loss = Callable[[nn.Module, Tensor], Tensor]
"""The mean loss of (B, T) token ids."""


def plain_steps(
    settings: dict[str, Any], build: Build, loss_of: Loss, extra_tokens: int = 0
) -> Iterator[nn.Module]:
    """A training on one process without end: one step for each model that it gives.

    `extra_tokens`: how many more ids than seq_len the loss wants of each sequence.
    """
    training = settings["training"]
    keep_freed_memory()
    torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision(training["matmul_precision"])
    torch.manual_seed(training["seed"])
    model = build(settings)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fused_adamw(trainable, training)
    gc.collect()
    gc.disable()  # as the native trainer does between steps
    bf16 = training["dtype"] == "bf16"
    shape = (training["global_batch"], training["seq_len"] + extra_tokens)
    while True:
        ids = torch.randint(0, settings["model"]["vocab_size"], shape)
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, training["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        yield model


def fused_adamw(parameters: list[nn.Parameter], training: dict[str, Any]) -> torch.optim.AdamW:
    """The optimizer of all plain loops, by the native trainer's settings."""
    return torch.optim.AdamW(
        parameters,
        lr=training["lr"],
        betas=tuple(training["betas"]),
        eps=training["eps"],
        weight_decay=training["weight_decay"],
        fused=True,
    )


def main(build: Build, loss_of: Loss, extra_tokens: int = 0) -> None:
    """Train for the settings' steps and print the step times."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    steps = plain_steps(settings, build, loss_of, extra_tokens)
    times: list[float] = []
    model = nn.Module()
    for _ in range(settings["training"]["steps"]):
        begin = time.perf_counter()
        model = next(steps)
        times.append(time.perf_counter() - begin)
    # The first step has the making of the model in it; it is never in the steady window.
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"step_time_s": times, "num_parameters": parameters}))
