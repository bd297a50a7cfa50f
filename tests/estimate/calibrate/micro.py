"""A recipe that trains in milliseconds, and measurements that the formulas made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.estimate.calibrate.calibration import About, Calibration
from paceline.estimate.calibrate.cases import recipes_of, short_trainings
from paceline.estimate.calibrate.measurement import Rates, TimedTraining, case_here
from paceline.estimate.fit.posterior import predict
from paceline.estimate.fit.refit import cpu_prior
from paceline.estimate.model.case import cases_of
from paceline.files.recipe import Recipe
from paceline.machines.probe.inventory import inventory

MICRO = """
name: micro
title: Micro
description: Trains in milliseconds.
model: {num_layers: 4, hidden_size: 64, num_heads: 4, ffn_size: 128, vocab_size: 300,
        max_positions: 32}
training: {seq_len: 32, global_batch: 8, steps: 4, dtype: fp32, lr: 1e-3, total_tokens: null}
data: {source: synthetic}
layout: {micro_batch: 8}
"""
ABOUT = About(
    device="Some CPU", kind="cpu", catalog_device="cpu", dtype="fp32", host="here",
    date="2026-01-02T00:00:00+00:00", torch="2.13", cores=2, memory_bytes=8e9,
)  # fmt: skip


def micro(folder: Path) -> str:
    """The recipe as a file."""
    path = folder / "micro.yaml"
    path.write_text(MICRO)
    return str(path)


def recipes(folder: Path) -> list[Recipe]:
    """The recipe, read."""
    return recipes_of([micro(folder)], "cpu")


def rates(ranks: int) -> Rates:
    """Probes of one placement on two cores, as the program prints them."""
    about: dict[str, Any] = {
        "ranks": ranks,
        "threads": 2 // ranks,
        "torch": "2.13",
        "spread": 0.02,
        "n": 9,
    }
    lines: list[dict[str, Any]] = [
        {"event": "gemm", "flops_per_s": 1e11 / ranks},
        {"event": "memory", "bytes": 2**26, "bytes_per_s": 2e10 / ranks},
        {"event": "latency", "seconds": 2e-6},
        {"event": "product", "shape": [256, 128, 64], "forward_s": 6e-5, "backward_s": 1.2e-4},
        {"event": "attention", "shape": [8, 32, 4, 4, 16], "forward_s": 1e-4, "backward_s": 2e-4},
    ]
    if ranks > 1:
        lines += [
            {"event": "collective", "bytes": 4096, "latency_s": 2e-4, "bus_bytes_per_s": 2e7},
            {"event": "collective", "bytes": 2**23, "latency_s": 5e-3, "bus_bytes_per_s": 1.7e9},
            {"event": "overlap", "exposed": 0.9},
        ]
    return Rates([about | line for line in lines])


def timed(folder: Path, factor: float = 1.0, seed: int = 1) -> list[TimedTraining]:
    """Short trainings on one and two ranks with 2% of noise.

    They are `factor` times as slow as a CPU in general.
    """
    cpu_inventory, draw = inventory(), np.random.default_rng(seed)
    bare = Calibration(
        **vars(ABOUT),
        placements=(rates(1).placement, rates(2).placement),
        probes=0,
        steps=(),
        undetermined_coefficients=(),
        inseparable_coefficients=(),
        evidence=cpu_prior("fp32"),
    )
    some = [
        s for n in (1, 2) for s in short_trainings(recipes(folder), cpu_inventory, "cpu", "fp32", n)
    ]
    x = cases_of([case_here(short.spec, bare) for short in some])
    seconds = factor * predict(x, bare.evidence.fit().centre) * draw.lognormal(0, 0.02, x.size)
    return [TimedTraining(s, t, 6, 0.02) for s, t in zip(some, seconds.tolist(), strict=True)]
