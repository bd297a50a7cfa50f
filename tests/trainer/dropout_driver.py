"""One step with dropout in several layouts of one world: what each rank drops, and its gradients.

Started as a module, once per rank: dropout_driver CASES.json FILE, where CASES.json holds the
content of trainer.json by case. Rank 0 writes what every rank has seen.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional

from paceline.trainer.config import TrainerConfig, parse_config
from paceline.trainer.config_checks import config_problems
from paceline.trainer.data.batches import Loader, sampler_of
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.measure.clock import HostClock, StepClock, watch_waits
from paceline.trainer.model import decoder
from paceline.trainer.parallel.mesh import World, join_world, make_mesh
from paceline.trainer.parallel.tensor import local
from paceline.trainer.replica import replica as replicas
from paceline.trainer.replica.assembly import make_replica


class Watcher:
    """Sees what is dropped of the stream, and from which random numbers attention drops."""

    def __init__(self) -> None:
        self.masks: list[Tensor] = []
        self.attention: list[Tensor] = []
        self._drop, self._attend = functional.dropout, decoder.attend

    def drop(self, x: Tensor, *arguments: Any, **settings: Any) -> Tensor:
        out = self._drop(x, *arguments, **settings)
        self.masks.append(out == 0)
        return out

    def attend(self, *inputs: Any, **settings: Any) -> Tensor:
        if settings.get("dropout"):
            self.attention.append(torch.get_rng_state())
        return self._attend(*inputs, **settings)


def run(config: TrainerConfig, world: World) -> dict[str, Any]:
    """What this rank drops in a step, what it goes on to draw, and its loss and gradients."""
    assert not (problems := config_problems(config, world.size)), problems
    mesh, corpus = make_mesh(world, config.layout, config.dp), load_corpus(config)
    replica = make_replica(config, world, mesh, StepClock(HostClock()))
    loader = Loader(corpus, sampler_of(config, corpus.num_windows), config, mesh, pin=False)
    batch, _ = loader.next()
    loader.close()
    watcher = Watcher()
    functional.dropout = watcher.drop  # type: ignore[assignment]
    decoder.attend = watcher.attend  # type: ignore[assignment]
    try:
        loss = replica.train(batch, 1.0)
        trained = len(watcher.masks), len(watcher.attention)
        after = torch.get_rng_state()
        replica.evaluate(batch, None)
        assert trained == (len(watcher.masks), len(watcher.attention)), "nothing is dropped there"
    finally:
        functional.dropout = watcher._drop  # type: ignore[assignment]
        decoder.attend = watcher._attend  # type: ignore[assignment]
    return {
        "loss": loss,
        "masks": watcher.masks,
        "attention": watcher.attention,
        "after": after,
        "gradients": {
            n: local(p.grad) for n, p in replica.named_parameters() if p.grad is not None
        },
    }


def main(cases: dict[str, Any], file: Path) -> None:
    """Train the cases one after the other."""
    torch.set_num_threads(1)
    replicas.COMPILER = "aot_eager"  # inductor takes 40 s more
    world, outcomes = join_world("cpu"), dict[str, Any]()
    if world.size > 1:
        watch_waits(StepClock(HostClock()))
    for name, raw in cases.items():
        ranks: list[Any] = [None] * world.size
        dist.all_gather_object(ranks, run(parse_config(raw), world))
        outcomes[name] = ranks
    if world.rank == 0:
        torch.save(outcomes, file)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
