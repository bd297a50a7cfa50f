"""A rank's place in the world."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.trainer.config import ConfigError, parse_config
from paceline.trainer.parallel.mesh import World, collective_timeout, join_world, make_mesh
from tests.numerics.cases import Case
from tests.trainer.example import run_ranks

WAITS_ALONE = """
import os, pathlib, time
import torch
from torch import distributed as dist
from paceline.trainer.config import LayoutConfig
from paceline.trainer.parallel.mesh import join_world, make_mesh

world = join_world("cpu")
os.environ["PACELINE_COLLECTIVE_LIMIT_S"] = "5"
layout = dict(tp=2, pp=1, cp=1, vp=1, ep=1, zero_stage=0, micro_batch=1, recompute="none")
more = dict(schedule="1f1b", sequence_parallel=False, dp_shard=None, cp_exchange="all-gather")
more["gradient_sync"] = None
mesh = make_mesh(world, LayoutConfig(**layout, **more), 2)
if world.rank == 0:
    try:
        dist.all_reduce(torch.ones(1), group=mesh.tp.group)
    except RuntimeError as error:
        print("gave up:", error, flush=True)
    pathlib.Path("over").touch()
while not os.path.exists("over"):
    time.sleep(0.05)
os._exit(0)
"""
"""A tensor group of a mesh, one of whose ranks never comes."""


def test_a_rank_without_a_gpu_of_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "999")

    with pytest.raises(ConfigError, match=r"local rank 999: .* visible GPUs"):
        join_world("cuda")


def test_collectives_take_as_long_as_the_launcher_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_COLLECTIVE_LIMIT_S", raising=False)
    assert collective_timeout() is None
    monkeypatch.setenv("PACELINE_COLLECTIVE_LIMIT_S", "90")
    assert collective_timeout() == timedelta(seconds=90)


@pytest.fixture
def absent() -> Iterator[World]:
    """Rank 5 of eight, the others of which are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield World(5, 5, 8, torch.device("cpu"), "fake")
    dist.destroy_process_group()


@pytest.mark.parametrize("words", ["tp2 cp2", "cp4 pp2", "cp2 pp2", "cp2 tp2 zero3 shard2"])
def test_no_ranks_have_two_groups_and_every_axis_has_its_ranks(words: str, absent: World) -> None:
    size, rank = absent.size, absent.rank
    layout = parse_config(Case(size, words, "llama", "fp32").settings()).layout
    dp = size // (layout.tp * layout.pp * layout.cp)

    mesh = make_mesh(absent, layout, dp)

    names = ("pp", "dp", "cp", "tp")
    whole = torch.arange(size).view(layout.pp, dp, layout.cp, layout.tp)
    place = [int(i) for i in (whole == rank).nonzero()[0]]
    assert mesh.coordinates == dict(zip(names, place, strict=True))
    for dim, name in enumerate(names):
        line = tuple(slice(None) if i == dim else place[i] for i in range(4))
        assert getattr(mesh, name).ranks == tuple(whole[line].tolist())
    assert mesh.cp.group is not None
    assert tuple(dist.get_process_group_ranks(mesh.cp.group)) == mesh.cp.ranks
    held = [tuple(dist.get_process_group_ranks(group)) for group in groups_of(rank)]
    assert sorted(held) == sorted({*held})


@pytest.mark.parametrize(
    ("words", "ep", "copies"),
    [
        ("ep2", (4, 5), (1, 3, 5, 7)),
        ("ep4 zero3", (4, 5, 6, 7), (1, 5)),
        ("ep2 tp2", (5, 7), (1, 5)),
        ("ep2 pp2", (4, 5), (5, 7)),
        ("ep4 cp2", (4, 5, 6, 7), (1, 5)),
    ],
)
def test_expert_ranks_follow_each_other_and_those_with_the_same_experts_are_ep_apart(
    words: str, ep: tuple[int, ...], copies: tuple[int, ...], absent: World
) -> None:
    layout = parse_config(Case(absent.size, words, "mixtral", "fp32").settings()).layout
    dp = absent.size // (layout.tp * layout.pp * layout.cp)

    mesh = make_mesh(absent, layout, dp)

    assert (mesh.ep.ranks, mesh.expert_data.ranks) == (ep, copies)
    for axis in (mesh.ep, mesh.expert_data):
        assert axis.group is not None and axis.ranks[axis.index] == absent.rank
        assert tuple(dist.get_process_group_ranks(axis.group)) == axis.ranks
    assert mesh.expert_mesh is not None and mesh.expert_mesh.get_group() is mesh.expert_data.group


def groups_of(rank: int) -> list[dist.ProcessGroup]:
    """The process groups of more than one rank that a rank belongs to."""
    known: Any = dist.distributed_c10d._world  # pyright: ignore[reportAttributeAccessIssue]
    groups = [group for group in known.pg_map if group.size() > 1]
    return [group for group in groups if rank in dist.get_process_group_ranks(group)]


def test_the_groups_of_a_mesh_keep_to_the_limit_too(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS_ALONE)

    _, output = run_ranks(4, tmp_path / "waits.py", folder=tmp_path)

    assert "gave up:" in output and "Timed out waiting 5000ms" in output, output
