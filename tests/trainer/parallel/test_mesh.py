"""A rank's place in the world."""

from __future__ import annotations

import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from paceline.trainer.config import ConfigError
from paceline.trainer.parallel.mesh import collective_limit, join_world
from tests.trainer.example import LIMIT_S, command

WAITS_ALONE = """
import os, time
import torch
from torch import distributed as dist
from paceline.trainer.config import LayoutConfig
from paceline.trainer.parallel.mesh import join_world, make_mesh

world = join_world("cpu")
os.environ["PACELINE_COLLECTIVE_LIMIT_S"] = "1"
layout = dict(tp=2, pp=1, cp=1, vp=1, ep=1, zero_stage=0, micro_batch=1, recompute="none")
more = dict(schedule="1f1b", sequence_parallel=False, dp_shard=None, cp_exchange="all-gather")
mesh = make_mesh(world, LayoutConfig(**layout, **more), 2)
if world.rank == 0:
    try:
        dist.all_reduce(torch.ones(1), group=mesh.tp.group)
    except RuntimeError as error:
        print("gave up:", error, flush=True)
else:
    time.sleep(4)
os._exit(0)
"""
"""A tensor group of a mesh, one of whose ranks never comes."""


def test_a_rank_without_a_gpu_of_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "999")

    with pytest.raises(ConfigError, match=r"local rank 999: .* GPUs are visible here"):
        join_world("cuda")


def test_collectives_take_as_long_as_the_launcher_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_COLLECTIVE_LIMIT_S", raising=False)
    assert collective_limit() is None
    monkeypatch.setenv("PACELINE_COLLECTIVE_LIMIT_S", "90")
    assert collective_limit() == timedelta(seconds=90)


def test_the_groups_of_a_mesh_keep_to_the_limit_too(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS_ALONE)

    done = subprocess.run(
        command(4, "waits.py"), cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )

    assert "gave up:" in done.stdout and "Timed out waiting 1000ms" in done.stdout, done.stderr
