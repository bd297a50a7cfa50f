"""Which way a metric improves, and which metrics are one measurement in another unit."""

from __future__ import annotations

from typing import Literal

Better = Literal["lower", "higher"]

TIMES = frozenset(
    {
        "step_time_s",
        "step_time_mean_s",
        "step_time_p05_s",
        "step_time_p95_s",
        "startup_s",
        "first_step_s",
        "days_to_train",
    }
)
"""Less is faster."""

RATES = frozenset(
    {
        "tokens_per_s",
        "tokens_per_s_per_device",
        "padded_tokens_per_s",
        "samples_per_s",
        "model_flops_per_s_per_device",
        "hardware_flops_per_s_per_device",
        "mfu",
        "hfu",
        "of_achievable",
    }
)
"""More is faster; all follow from the median step."""

MEAN_RATES = frozenset({"samples_per_s_mean"})
"""More is faster; they follow from the mean step."""

COSTS = frozenset({"jitter_tax", "data_wait_fraction", "comm_wait_fraction"})
"""Less is better, though not itself speed; so is every kind of memory."""

OF_TELEMETRY = frozenset({"energy_per_token_j"})
"""Less is better; only runs whose devices tell their power have them."""

NEUTRAL = frozenset(
    {"real_token_fraction", "attended_share", "achievable_flops_per_s", "loss_last"}
)
"""Neither way is an improvement of the run."""


def better(name: str) -> Better | None:
    """Which way the metric improves; None where neither does, or it is not known."""
    if name in RATES | MEAN_RATES:
        return "higher"
    return "lower" if name in TIMES | COSTS | OF_TELEMETRY or name.startswith("memory_") else None


def is_speed(name: str) -> bool:
    """True for metrics of which one says slower and faster, not worse and better."""
    return name in TIMES | RATES | MEAN_RATES


def follows(name: str) -> str | None:
    """The metric that `name` expresses in another unit, None when it stands for itself."""
    if name in RATES:
        return "step_time_s"
    return "step_time_mean_s" if name == "days_to_train" or name in MEAN_RATES else None
