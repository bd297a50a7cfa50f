"""What FSDP gathers together: nothing of a model's ends waits for the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.trainer.config import parse_config
from paceline.trainer.model.decoder import Decoder, LayerSetting, ModelPart
from paceline.trainer.parallel.mesh import World, make_mesh
from paceline.trainer.replica.replica import shard
from tests.numerics.cases import Case

RANKS = 2


@pytest.fixture
def world() -> Iterator[World]:
    """One of two ranks, the other of which is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield World(0, 0, RANKS, torch.device("cpu"), "fake")
    dist.destroy_process_group()


def sharded(world: World, model: str, first: bool = True, last: bool = True) -> Decoder:
    """A model, or an end of it, under ZeRO-3."""
    config = parse_config(Case(RANKS, "zero3", model, "fp32").settings())
    setting = LayerSetting(config.training.seq_len, torch.float32)
    part = Decoder(config.model, setting, ModelPart(range(2), first, last))  # type: ignore[arg-type]
    shard(part, make_mesh(world, config.layout, RANKS), reshard=True)
    return part


def gathered_with(part: Decoder, module: nn.Module) -> set[str]:
    """The layers whose weights are whole when those of a module's unit are."""
    assert isinstance(module, FSDPModule)
    module.unshard()
    whole = {name for name, p in part.named_parameters() if not isinstance(p, DTensor)}
    module.reshard()
    return {name.rpartition(".")[0] for name in whole}


def test_embedding_and_norm_with_head_are_gathered_apart(world: World) -> None:
    part = sharded(world, "llama")

    assert part.embedding is not None and part.head is not None
    assert gathered_with(part, part.embedding) == {"embedding"}
    assert gathered_with(part, part.head) == {"final_norm", "head"}
    assert gathered_with(part, part) == set()


def test_a_table_that_is_embedding_and_head_is_the_root_s(world: World) -> None:
    part = sharded(world, "gpt")

    assert {"embedding", "final_norm"} <= gathered_with(part, part)


@pytest.mark.parametrize(("first", "last"), [(True, False), (False, True), (False, False)])
def test_a_stage_has_the_units_of_its_own_end(world: World, first: bool, last: bool) -> None:
    part = sharded(world, "llama", first, last)

    found = {name for name, m in part.named_children() if isinstance(m, FSDPModule)}

    assert found == {*(["embedding"] if first else []), *(["final_norm", "head"] if last else [])}
    assert gathered_with(part, part) == set()
