"""Small values that many tests start from."""

from __future__ import annotations

import numpy as np

from paceline.core.hardware import Cluster
from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.core.steps import Step, Steps
from paceline.core.training import Data, Training

SHAPE = DecoderShape(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=64,
    vocab_size=320,
    gated_ffn=True,
    activation="silu",
    norm="rmsnorm",
    positions="rope",
    max_positions=64,
    bias=False,
    tied_embeddings=False,
)


def make_spec(ranks: int = 2, steps: int = 20, **fields: object) -> RunSpec:
    """A RunSpec of seconds on a CPU."""
    values: dict[str, object] = {
        "recipe": "example",
        "model": SHAPE,
        "training": Training(seq_len=32, global_batch=4 * ranks, steps=steps, dtype="fp32"),
        "data": Data(source="stdlib"),
        "layout": Layout(micro_batch=4),
        "cluster": Cluster(name="here", device="cpu", devices_per_node=ranks, threads_per_device=1),
        "time_limit_s": 120.0,
    }
    return RunSpec.model_validate({**values, **fields})


def make_steps(times: list[float], **columns: list[float]) -> Steps:
    """Steps 1.. with the given times; other columns have one value a step."""
    return Steps.of(
        Step(
            index=number,
            step_time_s=time,
            **{name: values[number - 1] for name, values in columns.items()},
        )
        for number, time in enumerate(times, start=1)
    )


def noisy(n: int, centre: float = 0.2, spread: float = 0.004, seed: int = 0) -> list[float]:
    """n step times around `centre`, seconds."""
    return list(np.random.default_rng(seed).normal(centre, spread, n))
