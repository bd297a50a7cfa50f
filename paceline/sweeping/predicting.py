"""What is expected of runs before they begin, and which of them are not worth their time."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.run import RunSpec
from paceline.core.sweeps import Prediction
from paceline.errors import UserError
from paceline.estimate.case import cases_of
from paceline.estimate.coefficients import named
from paceline.estimate.evidence import Evidence
from paceline.estimate.interval import bounds, log_sd
from paceline.estimate.machine import machine
from paceline.estimate.memory import memory, p_oom
from paceline.estimate.step import step_time
from paceline.estimating import case_of
from paceline.units import gib

SURE_OOM = 0.95
"""A combination that runs out of memory with a higher probability is left out."""
HOPELESS = 2.0
"""So is one whose optimistic bound is this many times the fastest one's pessimistic bound."""
LIKELY_OOM = 0.5


def predict(specs: Sequence[RunSpec], evidence: Evidence) -> list[Prediction | None]:
    """The expectation of each run; all None where the catalog has no data sheet of the device."""
    if not specs:
        return []
    cluster = specs[0].cluster
    try:
        here = machine(
            cluster.device, cluster.intra_link, cluster.inter_link, cluster.devices_per_node
        )
        # What comes with Paceline computes by PyTorch's modules, the other engines by fused ones.
        cases = [
            case_of(spec, here, "torch" if spec.engine == "native" else "fused",
                    spec.training.compile != "none")
            for spec in specs
        ]  # fmt: skip
    except UserError:
        return [None] * len(specs)
    limit = cluster.device_memory_bytes or here.device.memory_bytes or float("inf")
    x, fit = cases_of(cases), evidence.fit()
    times, needed = step_time(x, named(fit.centre)).total, memory(x)
    low, high = bounds(times, log_sd(x, fit, evidence.residual_sd))
    columns = (times, low, high, needed.device_used, p_oom(needed, limit))
    return [
        Prediction(step_time_s=time, low_s=a, high_s=b, memory_bytes=used, p_oom=odds)
        for time, a, b, used, odds in zip(*(column.tolist() for column in columns), strict=True)
    ]


def hopeless(
    predictions: Sequence[Prediction | None], tokens: Sequence[int], limit_bytes: float | None
) -> list[str | None]:
    """Why each is not worth running, None where it is or nothing was predicted.

    `tokens` are those of a step, so that batches of different sizes can be compared.
    """
    fitting = [
        one.high_s / n
        for one, n in zip(predictions, tokens, strict=True)
        if one is not None and one.p_oom <= LIKELY_OOM
    ]
    fastest = min(fitting, default=None)
    return [
        None if one is None else _why(one, one.low_s / n, fastest, limit_bytes)
        for one, n in zip(predictions, tokens, strict=True)
    ]


def _why(
    one: Prediction, optimistic: float, fastest: float | None, limit_bytes: float | None
) -> str | None:
    """The sentence for one prediction, its optimistic and the fastest one's pessimistic s/token."""
    if one.p_oom > SURE_OOM:
        room = f" of {gib(limit_bytes)}" if limit_bytes else ""
        return f"out of memory with {one.p_oom:.0%}: needs about {gib(one.memory_bytes)}{room}"
    if fastest is not None and optimistic > HOPELESS * fastest:
        return (
            f"at best {optimistic / fastest:.1f} times as slow as the fastest at worst "
            f"({one.step_time_s:.4g} s a step expected)"
        )
    return None
