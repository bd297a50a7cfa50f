"""A CUDA step's peak told apart by the allocator's counters.

The counters here are made by hand, and so are the allocations: what is tested is the arithmetic,
not that PyTorch's counters on a GPU move as these do.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from paceline.trainer.measure.allocator import WHOLE_GRADIENTS, AllocatorCounters, AllocatorStep
from paceline.trainer.measure.memory import DEVICE_EVERY, MemoryWatch, StateBytes

WEIGHT = 64
"""Bytes of one of the model's two weights."""


class Allocator:
    """Counters as the caching allocator keeps them, driven by hand."""

    def __init__(self, live: int) -> None:
        self.live = self.most = live

    def take(self, size: int) -> None:
        self.live += size
        self.most = max(self.most, self.live)

    def allocated(self) -> int:
        return self.live

    def peak(self) -> int:
        return self.most

    def reset(self) -> None:
        self.most = self.live


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def play(memory: Allocator, parts: nn.Module, activations: int, later: int) -> AllocatorStep:
    """A step: activations, a gradient, `later` bytes more, the other gradient, all freed."""
    step = AllocatorStep([parts], cast("AllocatorCounters", memory))
    first, second = parts.parameters()
    with step:
        memory.take(activations)
        memory.take(WEIGHT)
        (first * torch.ones(4, 4)).sum().backward()
        memory.take(later)
        memory.take(-activations - later)
        memory.take(WEIGHT)
        (second * torch.ones(4, 4)).sum().backward()
        memory.take(-2 * WEIGHT)
    return step


def state_bytes(buckets: int = 0) -> StateBytes:
    return StateBytes(
        weights=2 * WEIGHT, gradients=2 * WEIGHT, optimizer=4 * WEIGHT, buffers=8, buckets=buckets
    )


def test_gradients_that_were_there_at_the_peak_are_no_activations():
    before = 6 * WEIGHT + 8 + 100
    memory = Allocator(before)
    told = play(memory, model(), activations=1000, later=500).at_peak(state_bytes())

    assert told == {
        "weights": 128,
        "gradients": WEIGHT,
        "optimizer": 256,
        "buffers": 8,
        "activations": 1500,
        "other": 100,
    }
    assert sum(told.values()) == before + 1000 + WEIGHT + 500


def test_buckets_that_outlive_the_step_are_gradients_held_before():
    before = 6 * WEIGHT + 8 + 2 * WEIGHT
    told = play(Allocator(before), model(), activations=10, later=0).at_peak(
        state_bytes(2 * WEIGHT)
    )

    assert told["gradients"] == 2 * WEIGHT and told["other"] == 0
    assert told["activations"] == 2 * WEIGHT, "what was allocated on top, whatever it is"
    assert sum(told.values()) == before + 2 * WEIGHT


def test_hooks_are_gone_after_the_step():
    parts = model()
    play(Allocator(0), parts, 1, 1)

    assert all(not getattr(p, "_post_accumulate_grad_hooks", None) for p in parts.parameters())


class Sharded(nn.Linear, FSDPModule):
    """A part of a model that says which one it is."""

    def __init__(self, first: bool, last: bool) -> None:
        nn.Linear.__init__(self, 4, 4)
        self.part = SimpleNamespace(first=first, last=last)

    def __new__(cls, *_: object) -> Sharded:
        return nn.Linear.__new__(cls)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Sharded(True, False), WHOLE_GRADIENTS),
        (Sharded(False, True), WHOLE_GRADIENTS),
        (Sharded(True, True), None),
        (nn.Linear(4, 4), None),
    ],
)
def test_whole_gradients_of_a_sharded_pipeline_are_said_to_count_as_activations(
    module: nn.Module, why: str | None
):
    assert AllocatorStep([module], cast("AllocatorCounters", Allocator(0))).why == why


def test_the_driver_is_asked_now_and_then_and_its_last_value_kept(monkeypatch: pytest.MonkeyPatch):
    asked, allocated = [0], [0]

    def mem_get_info(_: object) -> tuple[int, int]:
        asked[0] += 1
        return 1000 - asked[0], 1000

    def grow(_: object) -> int:
        allocated[0] += 1
        return allocated[0]

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", grow)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", grow)
    watch = MemoryWatch(torch.device("cuda"), parts=False)
    told = [watch.peaks() for _ in range(2 * DEVICE_EVERY)]

    assert [peaks["device_used"] for peaks in told] == [1] * DEVICE_EVERY + [2] * DEVICE_EVERY
    assert [peaks["allocated"] for peaks in told] == list(range(1, 4 * DEVICE_EVERY, 2))
    assert watch.peaks()["device_used"] == 3 and watch.peaks(ask_device=True)["device_used"] == 4
