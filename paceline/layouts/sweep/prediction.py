"""Predict runs before they start, and prune those that are not worth running."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.core.units import gib, step_seconds
from paceline.estimate.calibrate.lookup import FileEvidence, file_or_device_evidence, machine_for
from paceline.estimate.estimates import (
    MAX_P_OOM_TO_FIT,
    MAX_P_OOM_TO_RUN,
    Estimates,
    estimates_of_runs,
)
from paceline.estimate.memory.device_memory import verdict
from paceline.estimate.run_case import Software, parse_software
from paceline.layouts.sweep.result import Prediction

MAX_SLOWDOWN = 2.0
"""Prune a combination if its lower bound exceeds this multiple of the fastest's upper bound."""


def predict(
    specs: Sequence[RunSpec], evidence: FileEvidence | None, stack: str | None = None
) -> list[Prediction]:
    """Return a prediction for each run.

    `evidence` None is the device's calibration; `stack` None is each run's engine. Raises UserError
    for a CPU without a calibration, and for a device or link without known rates.
    """
    if not specs:
        return []
    software = _software(specs[0], stack)
    dtypes = {spec.training.dtype for spec in specs}
    cluster, dtype = specs[0].cluster, specs[0].training.dtype
    if cluster.device == "cpu" and len(dtypes) > 1:
        raise UserError("a CPU calibration", "has one dtype, but these runs use several")
    rates = evidence.calibration if evidence else None
    estimates = estimates_of_runs(
        specs,
        [machine_for(spec.cluster, dtype, cpu_calibration=rates) for spec in specs],
        file_or_device_evidence(evidence, cluster.device, dtype, cluster.device_label),
        software,
    )
    return predictions_of(estimates)


def predictions_of(estimates: Estimates) -> list[Prediction]:
    """Return one prediction per row of the estimates."""
    columns = (
        estimates.step_time_s,
        *estimates.interval_s,
        estimates.memory.device_used,
        estimates.p_oom,
    )
    return [
        Prediction(
            step_time_s=seconds,
            low_s=low,
            high_s=high,
            memory_bytes=memory_bytes,
            p_oom=odds,
            memory=verdict(odds),
        )
        for seconds, low, high, memory_bytes, odds in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _software(spec: RunSpec, stack: str | None) -> Software | None:
    """Return the requested software; None for that of each run's engine."""
    if stack is None:
        return None
    if spec.cluster.device == "cpu":
        raise UserError(
            f"--software {stack}",
            "applies to GPUs only",
            remedy="leave it out",
        )
    return parse_software(stack, spec.training.compile != "none")


def prune_reasons(
    predictions: Sequence[Prediction | None],
    tokens: Sequence[int],
    limit_bytes: float | None,
    prune_above: float = MAX_P_OOM_TO_RUN,
) -> list[str | None]:
    """Return the reason to prune each run; None if it should run or has no prediction.

    Runs with an OOM probability above `prune_above` and clearly slow ones are pruned. `tokens` are
    tokens per step, so that different batches can be compared.
    """
    fitting = [
        prediction.high_s / n
        for prediction, n in zip(predictions, tokens, strict=True)
        if prediction is not None and prediction.p_oom <= MAX_P_OOM_TO_FIT
    ]
    fastest = min(fitting, default=None)
    return [
        _prune_reason(prediction, prediction.low_s / n, fastest, limit_bytes, prune_above)
        if prediction
        else None
        for prediction, n in zip(predictions, tokens, strict=True)
    ]


def _prune_reason(
    prediction: Prediction,
    optimistic: float,
    fastest: float | None,
    limit_bytes: float | None,
    prune_above: float,
) -> str | None:
    """Return the reason for one prediction.

    `optimistic` is its lower bound and `fastest` the upper bound of the fastest, in seconds per
    token.
    """
    if prediction.p_oom > prune_above:
        room = f" of {gib(limit_bytes)}" if limit_bytes else ""
        need = f"needs about {gib(prediction.memory_bytes)}{room}"
        bound = f"above --prune-above {prune_above:g}"
        return f"OOM probability {prediction.p_oom:.0%}, {bound}: {need}"
    if fastest is not None and optimistic > MAX_SLOWDOWN * fastest:
        return (
            f"at least {optimistic / fastest:.1f} times slower than the fastest "
            f"({step_seconds(prediction.step_time_s)} s per step expected)"
        )
    return None
