"""A plain training loop of another library on the same shape: _gpu_peer.py LIBRARY FILE.

LIBRARY is transformers or diffusers. Reads the native trainer's own settings file: shape, dtype,
batch, micro-batches, optimizer and clipping are the same on both sides; products run under autocast
over fp32 weights, as in the native trainer, and frozen weights have the compute dtype.
`PACELINE_PEER_COMPILE=1` compiles the model as a whole. Prints one JSON line {"step_time_s": [...],
"num_parameters", "allocated_bytes", "reserved_bytes"}; times are of the device's own clock on CUDA.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from _plain_loop import fused_adamw
from torch import Tensor, nn

Loss = Callable[[], Tensor]


def transformers_side(content: dict[str, Any], device: torch.device) -> tuple[nn.Module, Loss]:
    """A model of transformers, with peft's adapters where the settings have some."""
    from tests.trainer import peers

    with torch.device(device):
        model = peers.build(content).train()
    frozen_in_compute_dtype(model, content)
    runs = compiled(model)
    shape = (content["layout"]["micro_batch"], content["training"]["seq_len"])

    def loss() -> Tensor:
        ids = torch.randint(0, content["model"]["vocab_size"], shape, device=device)
        return runs(input_ids=ids, labels=ids).loss

    return model, loss


def diffusers_side(content: dict[str, Any], device: torch.device) -> tuple[nn.Module, Loss]:
    """diffusers' Flux transformer on one batch that is drawn once."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    from paceline.core.mmdit import MMDiTShape
    from paceline.trainer.config import parse_config
    from paceline.trainer.data.corpus import load_corpus
    from paceline.trainer.parallel.mesh import ALONE
    from tests.trainer.flux_peer import peer_settings, peer_velocity

    fields = {name: content["model"][name] for name in MMDiTShape.model_fields}
    shape = MMDiTShape.model_validate(fields)
    with torch.device(device):
        model = FluxTransformer2DModel(**peer_settings(shape))
    runs = compiled(model)
    corpus = load_corpus(parse_config(content))
    indices = [*range(content["layout"]["micro_batch"])]
    batch = [x.float().to(device) for x in corpus.collate(indices, ALONE)]
    noisy, velocity, *conditions = batch

    def loss() -> Tensor:
        predicted = peer_velocity(runs, shape, noisy, *conditions)
        return nn.functional.mse_loss(predicted.float(), velocity)

    return model, loss


SIDES = {"transformers": transformers_side, "diffusers": diffusers_side}


def frozen_in_compute_dtype(model: nn.Module, content: dict[str, Any]) -> None:
    """Convert frozen weights to the compute dtype, as the native trainer does."""
    if content["training"]["dtype"] == "bf16":
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)


def compiled(model: nn.Module) -> Any:
    """The model, compiled when asked for."""
    return torch.compile(model) if os.environ.get("PACELINE_PEER_COMPILE") == "1" else model


def steps(content: dict[str, Any], model: nn.Module, loss_of: Loss, device: str) -> Iterator[None]:
    """Training steps without end."""
    training = content["training"]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fused_adamw(trainable, training)
    count = content["num_microbatches"]
    half = training["dtype"] in ("bf16", "fp8")
    gc.collect()
    gc.disable()  # as the native trainer does between steps
    while True:
        for _ in range(count):
            with torch.autocast(device, torch.bfloat16, enabled=half):
                loss = loss_of()
            (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(trainable, training["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()
        yield


def main(side: str, path: str) -> None:
    """Train for the settings' steps and print their times."""
    content = json.loads(Path(path).read_text())
    training, device = content["training"], content["device"]
    torch.set_float32_matmul_precision(training["matmul_precision"])
    torch.manual_seed(training["seed"])
    model, loss_of = SIDES[side](content, torch.device(device))
    cuda = device == "cuda"
    times: list[float] = []
    # One step is in flight while the next is queued: the end of each is waited for a step later.
    training_steps = steps(content, model, loss_of, device)
    edges: list[Any] = []
    for _ in range(training["steps"] + 1):
        if cuda:
            edges.append(torch.cuda.Event(enable_timing=True))
            edges[-1].record()
        else:
            edges.append(time.perf_counter())
        next(training_steps)
    if cuda:
        torch.cuda.synchronize()
    for start, end in itertools.pairwise(edges):
        times.append(start.elapsed_time(end) / 1e3 if cuda else end - start)
    memory = torch.cuda.max_memory_allocated() if cuda else None
    reserved = torch.cuda.max_memory_reserved() if cuda else None
    parameters = sum(p.numel() for p in model.parameters())
    print(
        json.dumps(
            {
                "step_time_s": times,
                "num_parameters": parameters,
                "allocated_bytes": memory,
                "reserved_bytes": reserved,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
