"""Ranks of a driver, forked from a process that has imported what trainings need.

An interpreter of its own takes a rank longer than most of the cases that it trains.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.trainer import example

MODULES = (
    "paceline.trainer.evaluation",
    "paceline.trainer.replica.assembly",
    "paceline.trainer.trainer",
    "torch._dynamo.backends.debugging",
    "torch._inductor.compile_fx",
)
"""What drivers import, and what torch does once a block is compiled."""


def run_ranks(
    ranks: int, driver: Path, *arguments: str, folder: Path, limit_s: int
) -> tuple[int, str]:
    """Run a driver in `folder`, once a rank; the exit code and what all ranks printed."""
    return example.run_ranks(
        ranks, driver, *arguments, folder=folder, limit_s=limit_s, prepared=__name__
    )


def prepare() -> None:
    """Import all of it in the process that is forked."""
    example.prepare()
    for name in MODULES:
        importlib.import_module(name)
