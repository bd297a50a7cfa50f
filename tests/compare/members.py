"""Runs as a comparison sees them, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from paceline.compare.sides import ComparedRun, ComparisonSide
from paceline.core.result import Metric, WindowRecord
from paceline.core.run import RunSettings
from tests.example import make_spec

START = datetime(2026, 1, 1, tzinfo=UTC)
FACTS = RunSettings.of(make_spec())
WINDOW = WindowRecord(rule="auto", first_step=5, last_step=60, n=56, n_warmup=4, state="steady")
TOKENS = 256


def metrics_at(step_time_s: float, jitter: float = 0.01) -> dict[str, Metric]:
    """The metrics that follow from a step time, without intervals."""
    values = {
        "step_time_s": (step_time_s, "s"),
        "step_time_mean_s": (step_time_s * (1 + jitter), "s"),
        "jitter_overhead": (jitter, "fraction"),
        "tokens_per_s": (TOKENS / step_time_s, "tokens/s"),
        "tokens_per_s_per_device": (TOKENS / step_time_s / 2, "tokens/s/device"),
        "memory_resident_bytes": (6e8, "bytes"),
        "data_wait_fraction": (0.0, "fraction"),
    }
    return {name: Metric(value=value, unit=unit, n=56) for name, (value, unit) in values.items()}


def hour(at: float) -> str:
    """The time of a run, in hours after the first one."""
    return (START + timedelta(hours=at)).isoformat()


def member(
    name: str = "run",
    step_time_s: float = 0.2,
    *,
    jitter: float = 0.01,
    facts: RunSettings = FACTS,
    metrics: Mapping[str, Metric] | None = None,
    **fields: Any,
) -> ComparedRun:
    """A good run with this step time."""
    values: dict[str, Any] = {"status": "ok", "window": WINDOW, "created": hour(0), **fields}
    figures = metrics_at(step_time_s, jitter) if metrics is None else metrics
    return ComparedRun(name=name, facts=facts, metrics=figures, **values)


def side(step_times_s: Sequence[float], name: str = "side", **fields: Any) -> ComparisonSide:
    """Repeats with these step times, one an hour, so that two sides alternate."""
    return ComparisonSide(
        name,
        tuple(
            member(f"{name}-{i}", t, **{"created": hour(i), **fields})
            for i, t in enumerate(step_times_s)
        ),
    )


def repeats(
    n: int, change: float = 0.0, deviation: float = 0.004, name: str = "side", **fields: Any
) -> ComparisonSide:
    """n repeats around 0.2 s, `change` slower, whose logs deviate as stated to the last digit."""
    shape = np.linspace(-1, 1, n)
    shape = shape / shape.std(ddof=1) if n > 1 else shape * 0
    return side([float(0.2 * (1 + change) * np.exp(deviation * s)) for s in shape], name, **fields)
