"""One rank of a pipeline that writes down when each of its passes began and ended.

    _pipeline_ranks.py QUESTION.json ANSWER.json

The question is a list of {settings, repeats, sleep_s}; the answer has, for every one and every
repeat, a list of [kind, stage, micro-batch, begin, end] in seconds of the machine's clock, which
all processes share. The schedules are the trainer's. With `sleep_s` a stage's forward pass is a
sleep of that length in all of a rank's chunks together, its backward pass one of twice that; else
it is the decoder's own arithmetic.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from paceline.trainer.config import TrainerConfig, parse_config
from paceline.trainer.data.batches import LocalBatch
from paceline.trainer.measure.clock import HostClock, StepClock
from paceline.trainer.model.decoder import ModelPart
from paceline.trainer.parallel.mesh import Mesh, World, join_world, make_mesh
from paceline.trainer.replica.assembly import local_parts, make_replica
from paceline.trainer.replica.pipeline import LocalStage, PipelineRunner
from paceline.trainer.replica.replica import Runner

Passes = list[tuple[str, int, int, float, float]]


class Asleep(nn.Module):
    """A stage whose input's gradient takes as long as its forward pass, as does its weight's."""

    def __init__(self, part: ModelPart, hidden_size: int, pass_s: float) -> None:
        super().__init__()
        self.part, self.pass_s, self.hidden_size = part, pass_s, hidden_size
        self.setting = SimpleNamespace(dtype=torch.float32)
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """(B, T) tokens or (B, T, H) -> (B, T, H), or a loss."""
        if self.part.first:
            x = torch.zeros(*x.shape, self.hidden_size, requires_grad=True)
        # The sum of the two is where PyTorch cuts a backward pass into B and W.
        x = SlowInput.apply(x, self.pass_s) + SlowWeight.apply(self.weight, self.pass_s)
        return x.sum() if self.part.last else x


class SlowInput(torch.autograd.Function):
    """F and B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pass_s: float) -> Tensor:
        ctx.pass_s = pass_s
        time.sleep(pass_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.pass_s)
        return grad, None


class SlowWeight(torch.autograd.Function):
    """W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, pass_s: float) -> Tensor:
        ctx.pass_s = pass_s
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.pass_s)
        return grad, None


def record_passes(passes: Passes) -> None:
    """Have every stage write its passes into `passes`."""

    def record(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def run(self: LocalStage, microbatch: int, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = method(self, microbatch, *args, **kwargs)
            name = "BW" if kind == "B" and kwargs.get("full_backward", True) else kind
            passes.append((name, self.stage_index, microbatch, begin, time.perf_counter()))
            return result

        return run

    for name, kind in {"forward": "F", "backward": "B", "backward_weight": "W"}.items():
        method = f"{name}_one_chunk"
        setattr(LocalStage, method, record(getattr(LocalStage, method), kind))


def runner_of(config: TrainerConfig, sleep_s: float | None, world: World, mesh: Mesh) -> Runner:
    """The rank's stages and their schedule."""
    if sleep_s is None:
        replica: Any = make_replica(config, world, mesh, StepClock(HostClock()))
        return replica.runner
    pass_s = sleep_s / config.layout.vp
    parts: list[Any] = [
        Asleep(part, config.model.hidden_size, pass_s) for part in local_parts(config, mesh)
    ]
    return PipelineRunner(parts, mesh.pp, config, world.device)


def answer(case: dict[str, Any], world: World, passes: Passes) -> list[Passes]:
    """The passes of each repeat; a first step, in which PyTorch looks at shapes, is left out."""
    config = parse_config(case["settings"])
    runner = runner_of(config, case["sleep_s"], world, make_mesh(world, config.layout, config.dp))
    shape = (config.num_microbatches, config.layout.micro_batch, config.training.seq_len)
    ids = torch.zeros(shape, dtype=torch.int64)
    repeats: list[Passes] = []
    for _ in range(case["repeats"] + 1):
        dist.barrier()
        passes.clear()
        runner.step(LocalBatch(ids, ids, ids.numel()))
        repeats.append(list(passes))
    return repeats[1:]


def main(question: Path, into: Path) -> None:
    """Answer all cases in one world."""
    torch.set_num_threads(1)
    world, passes = join_world("cpu"), list[tuple[str, int, int, float, float]]()
    record_passes(passes)
    answers = [answer(case, world, passes) for case in json.loads(question.read_text())]
    into.with_name(f"{world.rank}-{into.name}").write_text(json.dumps(answers))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a normal exit


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
