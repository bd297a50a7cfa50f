"""Which random numbers come next on this rank: kept over work that draws some, in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The generators' states by kind: what dropping draws from, on a CPU and on its device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random(states: dict[str, Tensor], device: torch.device) -> None:
    """Go on from what `random_states` gave."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def kept_randomness(device: torch.device) -> Iterator[None]:
    """What runs inside draws random numbers that are drawn again afterwards."""
    states = random_states(device)
    try:
        yield
    finally:
        restore_random(states, device)


@contextmanager
def drawn_apart(place: int, device: torch.device) -> Iterator[None]:
    """What runs inside draws other numbers in each place, and afterwards all go on alike.

    They follow from the next number that all places draw alike, so that a kept state repeats them.
    """
    seed = int(torch.randint(2**62, ()).item()) + place
    with kept_randomness(device):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield
