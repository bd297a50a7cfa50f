"""Markers of steps for Nsight Systems; a list replaces the device's interfaces."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from paceline.trainer.config import ProfileConfig
from paceline.trainer.measure.torch_profiler import NsysProfiler
from paceline.trainer.parallel.mesh import Mesh, World
from paceline.trainer.train import make_profiler

ASKED = ProfileConfig(tool="nsys", ranks=[1], first_step=3, last_step=4)


def world(rank: int, device: str = "cuda") -> World:
    return World(rank, rank, 2, torch.device(device), None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []

    def opened(text: str) -> AbstractContextManager[None]:
        told.append(f"range {text}")
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: told.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: told.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: told.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("pop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", opened)
    return told


def test_the_capture_holds_the_chosen_steps_alone(calls: list[str]) -> None:
    profiler = make_profiler(ASKED, world(1), Mesh())
    assert isinstance(profiler, NsysProfiler)
    for step in range(1, 7):
        profiler.before_step(step)
        with profiler.range("paceline:data"):
            pass
        profiler.after_step(step)
    profiler.close()

    assert calls == [
        "synchronize", "start",
        "paceline:step 3 rank 1", "range paceline:data", "pop",
        "paceline:step 4 rank 1", "range paceline:data", "pop",
        "synchronize", "stop",
    ]  # fmt: skip


def test_a_training_that_ends_early_ends_the_capture(calls: list[str]) -> None:
    profiler = make_profiler(ASKED, world(1), Mesh())
    profiler.before_step(3)
    profiler.close()
    assert calls[-1] == "stop" and calls.count("stop") == 1


@pytest.mark.parametrize(("rank", "device"), [(0, "cuda"), (1, "cpu")])
def test_other_ranks_and_cpus_are_told_nothing(calls: list[str], rank: int, device: str) -> None:
    profiler = make_profiler(ASKED, world(rank, device), Mesh())
    profiler.before_step(3)
    profiler.after_step(3)
    assert calls == []
