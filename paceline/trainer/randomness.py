"""State of this rank's random number generators: saved, restored and made rank-specific."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the generators that dropout uses, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the states that `rng_states` returned."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Restore the generators on exit, so that the block leaves no trace in them."""
    states = rng_states(device)
    try:
        yield
    finally:
        restore_rng_states(states, device)


@contextmanager
def rank_specific_rng(rank: int, device: torch.device) -> Iterator[None]:
    """Draw different random numbers on each rank inside the block, and the same ones after it.

    The rank's seed derives from the next number of the common generator, so that a restored state
    reproduces it.
    """
    seed = int(torch.randint(2**62, ()).item()) + rank
    with preserve_rng(device):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield
