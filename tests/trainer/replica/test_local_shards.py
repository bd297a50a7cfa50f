"""An optimizer of sharded weights is given plain tensors, in the memory of this rank's shards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.trainer.config import TrainerConfig, parse_config
from paceline.trainer.measure.clock import HostClock, StepClock
from paceline.trainer.optim import make_optimizer
from paceline.trainer.parallel.mesh import World, make_mesh
from paceline.trainer.parallel.tensor import local
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.replica.replica import Replica
from tests.numerics.cases import Case

RANKS = 2


@pytest.fixture
def world() -> Iterator[World]:
    """One of two ranks, the other of which is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield World(0, 0, RANKS, torch.device("cpu"), "fake")
    dist.destroy_process_group()


def ready(world: World, words: str) -> tuple[TrainerConfig, Replica]:
    """A model, each of whose shards has a gradient of ones."""
    config = parse_config(Case(RANKS, words, "llama", "fp32").settings())
    mesh = make_mesh(world, config.layout, RANKS)
    replica = make_replica(config, world, mesh, StepClock(HostClock()))
    for _, parameter in replica.named_parameters():
        parameter.grad = torch.ones_like(parameter)
    return config, replica


@pytest.mark.parametrize("words", ["zero2", "zero3"])
@torch.no_grad()
def test_a_step_changes_the_shards_by_plain_tensors(world: World, words: str) -> None:
    config, replica = ready(world, words)
    parameters = [parameter for _, parameter in replica.named_parameters()]
    optimizer = make_optimizer(replica, config.training, None, None)
    # FSDP may put a shard elsewhere after the optimizer was made.
    for parameter in parameters[::2]:
        assert isinstance(parameter, DTensor)
        parameter._local_tensor = local(parameter).clone()
    before = [local(parameter).clone() for parameter in parameters]

    optimizer.step()

    updated = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert len(updated) == len(moments) == len(parameters)
    assert not any(isinstance(each, DTensor) for each in (*updated, *moments))
    assert all(weight.grad is None for weight in updated)
    assert all(
        (local(parameter) < old).all() for parameter, old in zip(parameters, before, strict=True)
    )
