"""Trains all cases of one world size with the trainer's own code and keeps what came out.

Started as a program, once per rank: driver.py CASES.json FOLDER. Rank 0 writes one file a case:
losses, gradient norms, every parameter's gradients of the first steps and weight after the last,
each put together from all ranks, and how far ranks are apart that should hold the same.
A rank that fails writes the reason and ends, which ends the others.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from faults import FAULTS, sound
from pieces import Joined, TensorShard, join
from torch import Tensor
from torch import distributed as dist

from paceline.trainer.config import EvaluationConfig, TrainerConfig, parse_config
from paceline.trainer.config_checks import config_problems
from paceline.trainer.data.batches import Loader, LocalBatch, sampler_of
from paceline.trainer.data.corpus import load_corpus, load_validation
from paceline.trainer.evaluation import Evaluator
from paceline.trainer.measure.clock import HostClock, StepClock, watch_waits
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.model.context_parallel import local_positions
from paceline.trainer.model.decoder import Decoder
from paceline.trainer.model.flux import MMDiT
from paceline.trainer.model.loss import IGNORE_INDEX
from paceline.trainer.model.network import Network
from paceline.trainer.parallel.mesh import Mesh, World, join_world, make_mesh
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.replica.replica import Replica
from paceline.trainer.trainer import Trainer

CASE_LIMIT_S = 300
WATCHED_STEPS = 3
HELD_OUT = EvaluationConfig(every_samples=1, skip_first=0, samples=11, target=None, path=None)
"""A number that no layout divides."""


class PlainSgd(torch.optim.SGD):
    """In AdamW's place: rounding is not amplified."""

    def __init__(self, params: Any, lr: float, **_: Any) -> None:
        super().__init__(params, lr)


class MaskedLoader(Loader):
    """A batch of prompts of different lengths, whose tokens are not targets.

    The later a sample, the longer its prompt, up to half of it: neither data-parallel ranks nor
    context-parallel ones count as many targets as another.
    """

    def batch(self, step: int) -> LocalBatch:
        """The batch with its mask."""
        batch = super().batch(step)
        seq_len = batch.targets.shape[-1] * self._cp.size
        sample = self._rank * batch.samples + torch.arange(batch.samples)
        prompt = sample * seq_len // (2 * self._sampler.sizes.batch(step))
        hidden = local_positions(seq_len, self._cp) < prompt.view(*batch.targets.shape[:2], 1)
        targets = batch.targets.masked_fill(hidden, IGNORE_INDEX)
        counted = int((targets != IGNORE_INDEX).sum())
        return replace(batch, targets=targets, num_valid_targets=counted)


class Watched:
    """A replica's training that keeps the gradients of the first steps, before they are clipped."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.train = replica, replica.train
        self.gradients: list[dict[str, TensorShard | None]] = []

    def __call__(self, batch: LocalBatch, scale: float) -> Tensor:
        """Train as ever, then look."""
        loss = self.train(batch, scale)
        if len(self.gradients) < WATCHED_STEPS:
            self.gradients.append(pieces(self.replica, gradients=True))
        return loss


def init_parameter(self: Network, name: str, whole: Tensor, generator: torch.Generator) -> None:
    """All weights at random, in place of the models' own beginnings.

    What begins as 0 (adapters, Flux' modulation) keeps other gradients 0, and with deviations of
    0.02 such narrow models attend to everything alike: positions would hardly matter. Much larger
    ones in a decoder's blocks would make a key's bias, whose gradient is rounding, count.
    """
    *_, layer, kind = name.split(".")
    mean = 1.0 if layer.endswith("norm") and kind == "weight" else 0.0
    width = whole.shape[1] if whole.ndim > 1 else 100
    gain = 0.5 if isinstance(self, Decoder) and name.startswith("blocks.") else 1.0
    whole.normal_(mean, gain * width**-0.5, generator=generator)


def pieces(replica: Replica, gradients: bool) -> dict[str, TensorShard | None]:
    """This rank's gradients, or its weights and routers' biases."""
    mesh, plan = replica.mesh, replica.tp_plan

    def piece(name: str, tensor: Tensor | None) -> TensorShard | None:
        dim = plan[name].shard_dim
        if name in replica.experts:
            return TensorShard.of_experts(tensor, dim, mesh)
        return TensorShard.of(tensor, dim, mesh.tp, mesh.shard)

    if gradients:
        return {name: piece(name, p.grad) for name, p in replica.named_parameters()}
    biases = {
        name: TensorShard.of(b, None, mesh.tp, mesh.shard) for name, b in replica.named_buffers()
    }
    return {name: piece(name, p) for name, p in replica.named_parameters()} | biases


def run(case: dict[str, Any], world: World, folder: Path) -> dict[str, Any] | None:
    """Train one case; on rank 0 what all ranks hold together."""
    config = parse_config(case["settings"])
    assert not (problems := config_problems(config, world.size)), problems
    torch.set_float32_matmul_precision(config.training.matmul_precision)
    mesh, steps = mesh_of(config, world), StepClock(HostClock())
    replica = make_replica(config, world, mesh, steps)
    replica.train = watched = Watched(replica)  # type: ignore[method-assign]
    trainer = Trainer(config, replica, world, steps, EventLog(str(folder), world.rank))
    trainer.masked = case["masked"]
    corpus = load_corpus(config)
    sampler = sampler_of(config, corpus.num_windows)
    loader = (MaskedLoader if case["masked"] else Loader)(corpus, sampler, config, mesh, pin=False)
    figures = [trainer.step(loader.next()[0])[0].tolist() for _ in range(case["steps"])]
    loader.close()
    held = {
        "figures": torch.tensor(figures, dtype=torch.float64),
        "gradients": watched.gradients,
        "weights": pieces(replica, gradients=False),
        "evaluation": evaluated(config, replica, world),
    }
    everyone = gathered(held, world)
    return together(everyone) if everyone else None


def evaluated(config: TrainerConfig, replica: Replica, world: World) -> float:
    """The loss on samples that are held out, after the training; it must leave nothing behind."""
    held_out = replace(config, training=replace(config.training, evaluation=HELD_OUT))
    evaluator = Evaluator(held_out, replica, world, load_validation(held_out))
    first, again = evaluator.loss(), evaluator.loss()
    assert first == again, f"a second evaluation gives {again}, not {first}"
    return first


def mesh_of(config: TrainerConfig, world: World) -> Mesh:
    """The layout's mesh, shared by layouts of the same sizes: groups take longer than training."""
    sizes = replace(
        config.layout,
        vp=1,
        micro_batch=1,
        recompute="none",
        schedule="",
        cp_exchange="",
        zero_stage=2 if config.layout.zero_stage >= 2 else 0,
        sequence_parallel=False,
    )
    return shared_mesh(world, sizes, config.dp)


shared_mesh = cache(make_mesh)


def gathered(held: dict[str, Any], world: World) -> list[dict[str, Any]]:
    """What every rank holds, on rank 0; empty on others."""
    if world.size == 1:
        return [held]
    everyone: list[Any] = [None] * world.size
    dist.gather_object(held, everyone if world.rank == 0 else None)
    return everyone if world.rank == 0 else []


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The training as one process would have seen it, and the distances between copies.

    Every rank reports the loss of its own tokens; ranks see equally many.
    """
    figures = torch.stack([rank["figures"] for rank in ranks])
    norms = figures[:, :, 1]
    weights = join(rank["weights"] for rank in ranks)
    first = [join(step) for step in zip(*(rank["gradients"] for rank in ranks), strict=True)]
    evaluations = [rank["evaluation"] for rank in ranks]
    assert len({*evaluations}) == 1, f"ranks differ in their evaluation: {evaluations}"
    apart = {"norms": ((norms - norms[0]).abs().max() / norms[0].abs().max()).item()}
    named: dict[str, Joined] = {"weights": weights}
    named |= {f"gradients in step {step}": joined for step, joined in enumerate(first, 1)}
    for kind, joined in named.items():
        apart |= {f"{kind}: {name}": far for name, far in joined.apart.items()}
    return {
        "figures": figures.mean(0),
        "gradients": [joined.tensors for joined in first],
        "weights": weights.tensors,
        "evaluation": torch.tensor(evaluations[0], dtype=torch.float64),
        "apart": apart,
    }


def attempt(case: dict[str, Any], world: World, folder: Path) -> None:
    """Run a case and write its result; ends the process when that fails."""
    start = time.perf_counter()
    faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
    try:
        with (
            FAULTS.get(case["fault"], sound)(world),
            patch("paceline.trainer.replica.replica.COMPILER", case["compiler"]),
            patch.object(torch.optim, "AdamW", PlainSgd if case["sgd"] else torch.optim.AdamW),
        ):
            result = run(case, world, folder)
            if case["compiler"]:
                check_compiled()
    except BaseException:
        (folder / f"{case['name']}.{world.rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()
    if result is not None:
        took = {"name": case["name"], "seconds": time.perf_counter() - start}
        (folder / f"{case['name']}.seconds").write_text(json.dumps(took))
        torch.save(result, folder / f"{case['name']}.pt")


def check_compiled() -> None:
    """Fail where blocks were not compiled after all; what was compiled is forgotten.

    The compiler gives up on a function, silently, when too many trainings have asked for it.
    """
    dynamo: Any = torch._dynamo
    graphs = dynamo.utils.counters["stats"]["unique_graphs"]
    gave_up = dict(dynamo.utils.counters["unimplemented"])
    dynamo.reset()
    dynamo.utils.counters.clear()
    assert graphs and not gave_up, f"{graphs} graphs were compiled, and not: {gave_up}"


def main(cases: list[dict[str, Any]], folder: Path) -> None:
    """Train the cases one after the other in one world."""
    torch.set_num_threads(1)
    Network.init_parameter = MMDiT.init_parameter = init_parameter  # type: ignore[method-assign]
    world = join_world("cpu")
    if world.size > 1:
        watch_waits(StepClock(HostClock()))
    for case in cases:
        attempt(case, world, folder)
    if world.size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
