"""What is expected of runs before they begin, and which of them are not worth their time."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.core.units import gib, step_seconds
from paceline.estimate.calibrate.lookup import GivenEvidence, given_or_own, machine_for
from paceline.estimate.estimates import MAX_P_OOM_TO_FIT, MAX_P_OOM_TO_RUN, estimates_of_runs
from paceline.estimate.memory.device_memory import verdict
from paceline.estimate.run_case import Software, parse_software
from paceline.layouts.sweep.result import Prediction

HOPELESS = 2.0
"""A combination is left out whose optimistic bound is this many times the fastest's pessimistic."""


def predict(
    specs: Sequence[RunSpec], given: GivenEvidence | None, stack: str | None = None
) -> list[Prediction]:
    """The expectation of each run; `given` None is what the device has.

    `stack` is the software that is expected to run them, None each run's engine.

    Raises UserError where nothing can be expected: a processor without a calibration of such runs,
    a device or link without rates.
    """
    if not specs:
        return []
    software = _software(specs[0], stack)
    dtypes = {spec.training.dtype for spec in specs}
    cluster, dtype = specs[0].cluster, specs[0].training.dtype
    if cluster.device == "cpu" and len(dtypes) > 1:
        raise UserError("a processor's calibration", "is of one dtype, and these runs have several")
    rates = given.calibration if given else None
    estimates = estimates_of_runs(
        specs,
        [machine_for(spec.cluster, dtype, given=rates) for spec in specs],
        given_or_own(given, cluster.device, dtype, cluster.device_label),
        software,
    )
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
            memory_bytes=used,
            p_oom=odds,
            memory=verdict(odds),
        )
        for seconds, low, high, used, odds in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _software(spec: RunSpec, stack: str | None) -> Software | None:
    """The software that was asked for, None for what each run's engine is."""
    if stack is None:
        return None
    if spec.cluster.device == "cpu":
        raise UserError(
            f"--software {stack}",
            "is of GPUs; on a processor PyTorch's modules compute whatever is run",
            remedy="leave it out",
        )
    return parse_software(stack, spec.training.compile != "none")


def hopeless(
    predictions: Sequence[Prediction | None],
    tokens: Sequence[int],
    limit_bytes: float | None,
    prune_above: float = MAX_P_OOM_TO_RUN,
) -> list[str | None]:
    """Why each is not worth running, None where it is or nothing was predicted.

    What runs out of memory with a probability above `prune_above` is not, nor what is slow.
    `tokens` are those of a step, so that batches of different sizes can be compared.
    """
    fitting = [
        prediction.high_s / n
        for prediction, n in zip(predictions, tokens, strict=True)
        if prediction is not None and prediction.p_oom <= MAX_P_OOM_TO_FIT
    ]
    fastest = min(fitting, default=None)
    return [
        _why(prediction, prediction.low_s / n, fastest, limit_bytes, prune_above)
        if prediction
        else None
        for prediction, n in zip(predictions, tokens, strict=True)
    ]


def _why(
    prediction: Prediction,
    optimistic: float,
    fastest: float | None,
    limit_bytes: float | None,
    prune_above: float,
) -> str | None:
    """The sentence for one prediction, its optimistic and the fastest one's pessimistic s/token."""
    if prediction.p_oom > prune_above:
        room = f" of {gib(limit_bytes)}" if limit_bytes else ""
        need = f"needs about {gib(prediction.memory_bytes)}{room}"
        bound = f"above --prune-above {prune_above:g}"
        return f"out of memory with {prediction.p_oom:.0%}, {bound}: {need}"
    if fastest is not None and optimistic > HOPELESS * fastest:
        return (
            f"at best {optimistic / fastest:.1f} times as slow as the fastest at worst "
            f"({step_seconds(prediction.step_time_s)} s a step expected)"
        )
    return None
