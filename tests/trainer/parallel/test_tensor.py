"""Every parameter is sharded by the plan of its module; one without a plan is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.trainer.checkpoint_tensors import as_dtensor, as_flat_slice
from paceline.trainer.config import ModelConfig, parse_config
from paceline.trainer.model.decoder import Decoder, LayerSetting
from paceline.trainer.model.flux import MMDiT
from paceline.trainer.model.layers import ColumnParallelLinear, Linear, RowParallelLinear
from paceline.trainer.model.network import Network, init_weights
from paceline.trainer.parallel.mesh import Mesh, MeshAxis
from paceline.trainer.parallel.tensor import (
    NO_TP,
    ParamPlan,
    TpPlan,
    local,
    shard_parameters,
    tp_plan_of,
)
from tests.numerics.cases import Case
from tests.numerics.models import MODELS

RANKS, EXPERTS, WIDTH = 2, 4, 6


class Experts(nn.Module):
    """Stacked matrices of experts, of which every rank has some, behind a router that all have."""

    tp_plan: TpPlan = {"up": ParamPlan(shard_dim=0), "router": ParamPlan(partial_grad=True)}

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, 3 * WIDTH, WIDTH))
        self.router = nn.Parameter(torch.empty(EXPERTS, WIDTH))


class ExpertBlock(Network):
    """A network that the trainer does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.out = Experts(), Linear(WIDTH, WIDTH, bias=True)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A device mesh of one tensor axis, whose other rank is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def network(name: str) -> Network:
    """A model of the numerics' table, without memory."""
    case = Case(1, "mb4", name, "fp32")
    config = parse_config(case.settings())
    setting = LayerSetting(config.training.seq_len, torch.float32, lora=config.lora)
    model = config.model
    with torch.device("meta"):
        return Decoder(model, setting) if isinstance(model, ModelConfig) else MMDiT(model, setting)


def initialised(rank: int | None) -> ExpertBlock:
    """The experts' network with its weights, whole or as one rank holds it."""
    tp = MeshAxis() if rank is None else MeshAxis(RANKS, rank)
    with torch.device("meta"):
        model = ExpertBlock()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    shard_parameters(model, tp, None)
    model.to_empty(device="cpu")
    init_weights(model, shapes, 3, Mesh(tp=tp))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_modules_of_every_model_say_how_all_their_parameters_are_held(name: str) -> None:
    model = network(name)

    plans = tp_plan_of(model)

    assert plans.keys() == dict(model.named_parameters()).keys()
    cut = {key for key, plan in plans.items() if plan.shard_dim is not None}
    matrices = {key for key, p in model.blocks.named_parameters() if p.ndim > 1}
    uncut = {f"blocks.{key}" for key in matrices} - cut
    assert cut and all(plans[key].partial_grad for key in uncut), "of adapters alone"


def test_with_sequence_parallelism_gradients_of_all_whole_parameters_are_summed() -> None:
    plans = tp_plan_of(network("lora"))

    summed = {key for key, plan in plans.items() if plan.sums_grad(sequence_parallel=False)}
    with_sp = {key for key, plan in plans.items() if plan.sums_grad(sequence_parallel=True)}

    assert {key.rpartition(".")[2] for key in summed} == {"lora_a", "lora_b"}
    assert with_sp == {key for key, plan in plans.items() if plan.shard_dim is None}
    assert "final_norm.weight" in with_sp - summed


def test_a_parameter_without_a_plan_is_named() -> None:
    model = ExpertBlock()
    model.experts.bias = nn.Parameter(torch.zeros(EXPERTS))

    with pytest.raises(AssertionError, match=r"experts\.bias is missing in Experts\.tp_plan"):
        tp_plan_of(model)


def test_a_parameter_that_cannot_be_cut_evenly_is_refused() -> None:
    with torch.device("meta"):
        column = nn.ModuleDict({"up": ColumnParallelLinear(4, 65, bias=True)})
        row = RowParallelLinear(NO_TP, 4, 65, bias=True)

    with pytest.raises(ValueError, match=r"up\.weight: tp 2 does not divide 65"):
        shard_parameters(column, MeshAxis(RANKS), None)
    shard_parameters(row, MeshAxis(RANKS), None)
    assert (row.weight.shape, row.bias.shape) == ((65, 2), (65,))


def test_stacked_experts_are_cut_and_initialised_by_their_own_plan() -> None:
    whole = initialised(None)
    parts = [initialised(rank) for rank in range(RANKS)]

    assert all(part.experts.up.shape == (EXPERTS // RANKS, 3 * WIDTH, WIDTH) for part in parts)
    assert torch.equal(torch.cat([part.experts.up for part in parts]), whole.experts.up)
    assert all(torch.equal(part.experts.router, whole.experts.router) for part in parts)
    assert whole.experts.up.std() > 0


def test_a_checkpoint_knows_which_experts_a_rank_holds(mesh: Any) -> None:
    plan, up = Experts.tp_plan["up"], torch.arange(2.0).view(2, 1)
    tp = MeshAxis(RANKS, 1)

    tensor = as_dtensor(plan, up, Mesh(tp=tp, device_mesh=mesh))
    piece = as_flat_slice(plan, up.flatten(), tuple(up.shape), 0, Mesh(tp=tp))

    assert (tensor.shape, tensor.placements) == ((EXPERTS, 1), (Shard(0),))  # type: ignore[attr-defined]
    assert Experts.tp_plan["router"].placement == Replicate()
    assert torch.equal(local(tensor), up)
    (chunk,) = piece.__create_chunk_list__()
    assert (tuple(chunk.offsets), tuple(chunk.sizes)) == ((2, 0), (2, 1))
