"""A CUDA step's peak told apart by the allocator's counters, which a play of allocations stands for."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from allocator import AllocatorStep, Counters
from memory import Held

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
    step = AllocatorStep([parts], cast("Counters", memory))
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


def held(buckets: int = 0) -> Held:
    return Held(
        weights=2 * WEIGHT, gradients=2 * WEIGHT, optimizer=4 * WEIGHT, buffers=8, buckets=buckets
    )


def test_gradients_that_were_there_at_the_peak_are_no_activations():
    before = 6 * WEIGHT + 8 + 100
    memory = Allocator(before)
    told = play(memory, model(), activations=1000, later=500).at_peak(held())

    assert told == {
        "weights": 128, "gradients": WEIGHT, "optimizer": 256, "buffers": 8,
        "activations": 1500, "other": 100,
    }  # fmt: skip
    assert sum(told.values()) == before + 1000 + WEIGHT + 500


def test_buckets_that_outlive_the_step_are_gradients_held_before():
    before = 6 * WEIGHT + 8 + 2 * WEIGHT
    told = play(Allocator(before), model(), activations=10, later=0).at_peak(held(2 * WEIGHT))

    assert told["gradients"] == 2 * WEIGHT and told["other"] == 0
    assert told["activations"] == 2 * WEIGHT, "what was allocated on top, whatever it is"
    assert sum(told.values()) == before + 2 * WEIGHT


def test_hooks_are_gone_after_the_step():
    parts = model()
    play(Allocator(0), parts, 1, 1)

    assert all(not getattr(p, "_post_accumulate_grad_hooks", None) for p in parts.parameters())
