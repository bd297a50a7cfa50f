"""Metrics: one function each, registered with name and title; its docstring says what it measures.

A metric reads one `TimedRun`. It returns a value, or None with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from paceline.core.rates import days, mfu, samples_per_s, tokens_per_s
from paceline.core.result import Metric
from paceline.core.stats import MAX_RESAMPLED
from paceline.core.timed_run import TimedRun, first_value, mean_value
from paceline.core.units import count

FLOPS_SETTINGS = ("model", "seq_len", "global_batch", "num_devices", "flops_convention")
"""Settings that are required to compute FLOP/s."""

BOOTSTRAP_INTERVAL = "within-run 95%, moving-block bootstrap of the median"
ORDER_STATISTIC_INTERVAL = "within-run 95%, order statistics of the median"
ROUNDING_SUFFIX = ", and half a printed digit"


@dataclass(frozen=True)
class MetricClass:
    """Comparison of a metric: direction of improvement, and whether it is a speed."""

    better: Literal["lower", "higher"] | None
    """Direction of improvement; None if neither direction is an improvement."""
    is_speed: bool = False
    """True if a change is described as slower or faster instead of worse or better."""
    follows: str | None = None
    """Metric that this one expresses in another unit; None for an independent metric."""


TIME = MetricClass("lower", is_speed=True)
MEAN_TIME = MetricClass("lower", is_speed=True, follows="step_time_mean_s")
RATE = MetricClass("higher", is_speed=True, follows="step_time_s")
MEAN_RATE = MetricClass("higher", is_speed=True, follows="step_time_mean_s")
OVERHEAD = MetricClass("lower")
"""Share of the step. It varies from run to run as the step time does."""
USAGE = MetricClass("lower")
"""Memory and energy."""
NEUTRAL = MetricClass(None)


@dataclass(frozen=True)
class MetricKind:
    """Declaration of one metric, and the function that computes it."""

    name: str
    title: str
    describes: str
    compares: MetricClass
    compute: Callable[[TimedRun], Metric]
    needs: Literal["any figure", "steps", "many steps"] = "any figure"
    """Required log contents. `steps` requires step times instead of a printed rate, `many steps`
    more than one figure for the whole run."""
    in_window: bool = True
    """True if the metric is taken from the steady window, False if from the whole run or the
    machine."""


METRICS: dict[str, MetricKind] = {}
ENERGY_PER_TOKEN = "energy_per_token_j"
"""Metric of runs whose devices report their power. It is measured by telemetry, not from steps."""


def metric_class(name: str) -> MetricClass:
    """Return the class of metric `name`; unknown metrics are neutral."""
    if name in METRICS:
        return METRICS[name].compares
    return USAGE if name == ENERGY_PER_TOKEN or name.startswith("memory_") else NEUTRAL


def measure(run: TimedRun) -> dict[str, Metric]:
    """Return all registered metrics of one run, by name."""
    return {name: kind.compute(run) for name, kind in METRICS.items()}


def _metric(
    name: str, title: str, compares: MetricClass, **options: Any
) -> Callable[[Callable[[TimedRun], Metric]], Callable[[TimedRun], Metric]]:
    """Register the decorated function as metric `name`; its docstring's first line describes it."""

    def register(compute: Callable[[TimedRun], Metric]) -> Callable[[TimedRun], Metric]:
        describes = (compute.__doc__ or "").partition("\n")[0]
        METRICS[name] = MetricKind(name, title, describes, compares, compute, **options)
        return compute

    return register


def _kind_of_interval(run: TimedRun) -> str:
    kind = ORDER_STATISTIC_INTERVAL if run.times.n > MAX_RESAMPLED else BOOTSTRAP_INTERVAL
    return kind + (ROUNDING_SUFFIX if run.resolution_s else "")


@_metric("step_time_s", "Step time, median", TIME, needs="steps")
def _step_time(run: TimedRun) -> Metric:
    """Median steady step (mean if uneven): what the machine can do."""
    low, high = run.interval_s or (None, None)
    return Metric(
        value=run.typical_step_s,
        unit="s",
        n=run.times.n,
        spread=run.spread,
        low=low,
        high=high,
        interval=_kind_of_interval(run) if low is not None else None,
        statistic=run.statistic,
    )


@_metric("step_time_mean_s", "Step time, mean", TIME, needs="steps")
def _step_time_mean(run: TimedRun) -> Metric:
    """Mean of the window, spikes included: what the clock pays."""
    return Metric(value=run.times.mean, unit="s", n=run.times.n, statistic="mean")


@_metric("step_time_p05_s", "Step time, 5th percentile", TIME, needs="many steps")
def _step_time_p05(run: TimedRun) -> Metric:
    """5th percentile of the window's step times."""
    return Metric(value=run.times.p05, unit="s", n=run.times.n, statistic="p05")


@_metric("step_time_p95_s", "Step time, 95th percentile", TIME, needs="many steps")
def _step_time_p95(run: TimedRun) -> Metric:
    """95th percentile of the window's step times."""
    return Metric(value=run.times.p95, unit="s", n=run.times.n, statistic="p95")


@_metric("jitter_overhead", "Jitter overhead", OVERHEAD, needs="steps")
def _jitter_overhead(run: TimedRun) -> Metric:
    """Mean over median step time, minus 1: what spikes cost."""
    return Metric(value=run.times.jitter_overhead, unit="fraction", n=run.times.n)


@_metric("tokens_per_s", "Throughput", RATE)
def _tokens_per_s(run: TimedRun) -> Metric:
    """Real (unpadded) tokens per second at the median step, all devices."""
    return _rate(run, _real_tokens_per_s(run), "tokens/s")


@_metric("tokens_per_s_per_device", "Throughput per device", RATE)
def _tokens_per_s_per_device(run: TimedRun) -> Metric:
    """Real tokens per second at the median step and device."""
    rate, num_devices = _real_tokens_per_s(run), run.facts.num_devices
    per_device = rate / num_devices if rate is not None and num_devices else None
    return _rate(run, per_device, "tokens/s/device", "num_devices")


@_metric("padded_tokens_per_s", "Throughput with padding", RATE)
def _padded_tokens_per_s(run: TimedRun) -> Metric:
    """Token positions per second, padding included, all devices."""
    seq_len, batch = run.seq_len, run.global_batch
    rate = tokens_per_s(seq_len, batch, run.typical_step_s) if seq_len and batch else None
    return _rate(run, rate, "tokens/s", "seq_len", "global_batch")


@_metric("real_token_fraction", "Real tokens", NEUTRAL)
def _real_token_fraction(run: TimedRun) -> Metric:
    """Real tokens over token positions."""
    real, seq_len, batch = _real_tokens(run), run.seq_len, run.global_batch
    if real is None or not seq_len or not batch:
        return Metric(
            value=None, unit="fraction", note=run.facts.unknown("seq_len", "global_batch")
        )
    return Metric(value=real / (batch * seq_len), unit="fraction", n=run.times.n)


@_metric("attended_share", "Attended pairs", NEUTRAL)
def _attended_share(run: TimedRun) -> Metric:
    """Share of attention's pairs in a sequence that document masking leaves.

    It is sum l^2 / seq_len^2 over documents of l tokens, as the FLOPs of the run count it.
    """
    share = run.attended_share
    if share is None:
        return Metric(value=None, unit="fraction", note="document masking is not reported")
    return Metric(value=share, unit="fraction", n=run.times.n, statistic="mean")


@_metric("expert_overload", "Expert overload", NEUTRAL)
def _expert_overload(run: TimedRun) -> Metric:
    """Largest load of an expert over the mean load, averaged over layers; 1 is balance."""
    return _expert_load(run, "expert_overload", "x")


@_metric("dead_experts", "Dead experts", NEUTRAL)
def _dead_experts(run: TimedRun) -> Metric:
    """Share of the experts that no token is routed to in a step."""
    return _expert_load(run, "dead_experts", "fraction")


def _expert_load(run: TimedRun, name: str, unit: str) -> Metric:
    value = mean_value(run.window[name])
    if value is None:
        return Metric(value=None, unit=unit, note="the load of experts is not reported")
    return Metric(value=value, unit=unit, n=run.times.n, statistic="mean")


@_metric("samples_per_s", "Samples", RATE)
def _samples_per_s(run: TimedRun) -> Metric:
    """Sequences per second at the median step, all devices."""
    batch = run.global_batch
    rate = samples_per_s(batch, run.typical_step_s) if batch else None
    return _rate(run, rate, "samples/s", "global_batch")


@_metric("samples_per_s_mean", "Samples, mean", MEAN_RATE)
def _samples_per_s_mean(run: TimedRun) -> Metric:
    """Sequences of the steady steps over their seconds, all devices.

    It is per_device_batch x world x timed steps / their seconds, as in Lambda's benchmark.
    """
    batch, unit = run.global_batch, "samples/s"
    if not batch:
        return Metric(value=None, unit=unit, note=run.facts.unknown("global_batch"))
    rate = samples_per_s(batch, run.times.mean)
    return Metric(value=rate, unit=unit, n=run.times.n, statistic="mean")


@_metric("model_flops_per_s_per_device", "Model FLOP/s per device", RATE)
def _flops(run: TimedRun) -> Metric:
    """FLOP/s of one device, recomputation not counted."""
    return _flops_rate(run, run.flops_per_s_per_device, run.model_convention, *FLOPS_SETTINGS)


@_metric("hardware_flops_per_s_per_device", "Hardware FLOP/s per device", RATE)
def _hardware_flops(run: TimedRun) -> Metric:
    """Model FLOP/s with recomputation counted as work."""
    rate, convention = run.hardware_flops_per_s_per_device, run.hardware_convention
    return _flops_rate(run, rate, convention, *FLOPS_SETTINGS, "layout")


@_metric("mfu", "MFU", RATE)
def _mfu(run: TimedRun) -> Metric:
    """Model FLOP/s over the device's dense data-sheet peak."""
    rate, convention = run.flops_per_s_per_device, run.model_convention
    return _share(run, rate, convention, run.peak_flops_per_s, run.peak_source)


@_metric("hfu", "HFU", RATE)
def _hfu(run: TimedRun) -> Metric:
    """MFU with the configured recomputation counted as work."""
    rate, convention = run.hardware_flops_per_s_per_device, run.hardware_convention
    return _share(run, rate, convention, run.peak_flops_per_s, run.peak_source)


@_metric("achievable_fraction", "Of what is reachable here", RATE)
def _of_achievable(run: TimedRun) -> Metric:
    """Model FLOP/s over the best GEMM rate measured on this machine."""
    rate, num_devices = run.flops_per_s_per_device, run.facts.num_devices
    return _share(
        run,
        rate * num_devices if rate is not None and num_devices else None,
        run.model_convention,
        run.achievable_flops_per_s,
        run.achievable_source,
        missing="the reachable rate was not probed",
    )


@_metric("achievable_flops_per_s", "Reachable on this machine", NEUTRAL, in_window=False)
def _achievable(run: TimedRun) -> Metric:
    """Best GEMM rate measured here, all devices together."""
    return Metric(value=run.achievable_flops_per_s, unit="FLOP/s", source=run.achievable_source)


@_metric("startup_s", "Start-up", TIME, in_window=False)
def _startup(run: TimedRun) -> Metric:
    """From the launch to the first step's begin."""
    return Metric(value=run.startup_s, unit="s", n=1 if run.startup_s is not None else None)


@_metric("first_step_s", "First step", TIME, needs="steps", in_window=False)
def _first_step(run: TimedRun) -> Metric:
    """First step, with lazy initialisation and compilation."""
    if not len(run.steps) or run.steps.index[0] > 1 or run.steps.averaged_over[0] > 1:
        return Metric(value=None, unit="s", note="the log begins later or averages over steps")
    return Metric(value=first_value(run.steps["step_time_s"][:1]), unit="s", n=1)


def _peak_memory(kind: str, describes: str) -> Callable[[TimedRun], Metric]:
    """Return the function of the largest rank's peak of one kind of memory."""

    def compute(run: TimedRun) -> Metric:
        column = run.steps[f"{kind}_bytes"]
        peaks = column[np.isfinite(column)]
        if len(peaks):
            peak, devices = float(peaks.max()), run.facts.num_devices
            return Metric(value=peak, unit="bytes", n=devices, statistic="max")
        measured_here = run.facts.origin == "measured"
        none = f"this device reports no {kind.replace('_', ' ')} memory"
        note = none if measured_here else "the log does not say"
        return Metric(value=None, unit="bytes", note=note)

    compute.__doc__ = describes
    return compute


for _kind, _title, _describes in (
    ("allocated", "allocated peak", "Peak of the allocator's live tensors, largest rank."),
    ("reserved", "reserved peak", "Peak that the allocator holds from the device, largest rank."),
    ("resident", "resident peak", "Peak resident set of the process, largest rank."),
    (
        "device_used",
        "used on the device",
        "Peak in use on a device by all programs, context included.",
    ),
):
    _metric(f"memory_{_kind}_bytes", f"Memory, {_title}", USAGE, in_window=False)(
        _peak_memory(_kind, _describes)
    )


@_metric("data_wait_fraction", "Waiting for data", OVERHEAD, needs="steps")
def _data_wait(run: TimedRun) -> Metric:
    """Share of the step that the slowest loader keeps its rank waiting, median step."""
    return _fraction_of_step(run, "data_wait_s")


@_metric("comm_wait_fraction", "Waiting in collectives", OVERHEAD, needs="steps")
def _comm_wait(run: TimedRun) -> Metric:
    """Share of the step blocked in collectives, median rank."""
    return _fraction_of_step(run, "comm_wait_s")


@_metric("days_to_train", "Whole training", MEAN_TIME)
def _days_to_train(run: TimedRun) -> Metric:
    """Days for the recipe's total tokens at the mean step, no failures."""
    total, tokens = run.facts.total_tokens, _tokens_trained_on(run)
    if total is None:
        return Metric(value=None, unit="days", note="the recipe names no total of tokens")
    if tokens is None:
        return Metric(value=None, unit="days", note=run.facts.unknown("seq_len", "global_batch"))
    value = days(total, tokens / run.times.mean)
    return Metric(
        value=value, unit="days", n=run.times.n, statistic="mean", note=f"for {count(total)} tokens"
    )


@_metric("loss_last", "Loss at the end", NEUTRAL)
def _loss_last(run: TimedRun) -> Metric:
    """Mean loss of the window's last five steps."""
    last = run.window["loss"][-5:]
    model = run.facts.model
    unit = model.loss_unit if model else "nats/token"
    return Metric(value=mean_value(last), unit=unit, n=len(last), statistic="mean")


def _flops_rate(run: TimedRun, value: float | None, convention: str | None, *needs: str) -> Metric:
    metric = _rate(run, value, "FLOP/s", *needs)
    return metric.model_copy(update={"convention": convention})


def _rate(run: TimedRun, value: float | None, unit: str, *needs: str) -> Metric:
    """Return a rate at the typical step, with an interval from the interval of the step time."""
    step_s = run.typical_step_s
    low_s, high_s = run.interval_s or (None, None)
    if value is None:
        return Metric(
            value=None, unit=unit, note=run.facts.unknown(*needs) or "the log does not say"
        )
    return Metric(
        value=value,
        unit=unit,
        n=run.times.n,
        spread=run.spread,
        low=None if high_s is None else value * step_s / high_s,
        high=None if low_s is None else value * step_s / low_s,
        interval=_kind_of_interval(run) if low_s is not None else None,
        statistic=f"at the {run.statistic} step",
    )


def _share(
    run: TimedRun,
    rate: float | None,
    convention: str | None,
    limit: float | None,
    source: str | None,
    missing: str | None = None,
) -> Metric:
    """Return rate / limit, or the reason why there is no limit."""
    facts, note = run.facts, None
    if limit is None:
        peak = f"no data-sheet peak for {facts.device} in {facts.dtype}"
        note = missing or run.no_peak or facts.unknown("device", "dtype") or peak
    elif rate is None:
        note = facts.unknown(*FLOPS_SETTINGS) or "the log does not say"
    return Metric(
        value=None if rate is None else mfu(rate, limit),
        unit="fraction",
        n=run.times.n,
        spread=run.spread,
        convention=convention,
        source=source,
        note=note,
    )


def _fraction_of_step(run: TimedRun, name: str) -> Metric:
    is_known = run.window.known(name)
    share = run.window[name] / run.window["step_time_s"] if is_known else np.empty(0)
    finite = share[np.isfinite(share)]
    if not len(finite):
        return Metric(value=None, unit="fraction", note="the log does not say")
    return Metric(
        value=float(np.median(finite)), unit="fraction", n=len(finite), statistic="median"
    )


def _real_tokens_per_s(run: TimedRun) -> float | None:
    tokens = _real_tokens(run)
    return None if tokens is None else tokens / run.typical_step_s


def _real_tokens(run: TimedRun) -> float | None:
    """Return the unpadded tokens per step.

    Synthetic samples have no padding, so the recipe's figure for the data that they represent takes
    precedence. Otherwise the count of the ranks is used. An imported log without token counts is
    assumed to have no padding, unless it is known to be padded.
    """
    tokens_per_sample, batch, seq_len = (
        run.facts.real_tokens_per_sample,
        run.global_batch,
        run.seq_len,
    )
    stated_tokens = tokens_per_sample * batch if tokens_per_sample and batch else None
    counted_tokens = mean_value(run.window["tokens"])
    if stated_tokens is not None and (
        counted_tokens is None or run.facts.data in (None, "synthetic")
    ):
        return stated_tokens
    if counted_tokens is not None or run.facts.origin == "measured":
        return counted_tokens
    padded = run.facts.packing == "padded"
    return batch * seq_len if batch and seq_len and not padded else None


def _tokens_trained_on(run: TimedRun) -> float | None:
    """Return the tokens per step that count toward the length of the training.

    An imported log of masked samples counts the targets of the loss, which are only a part of the
    text. In that case every position counts.
    """
    facts, batch, seq_len = run.facts, run.global_batch, run.seq_len
    masked = facts.loss_on == "text" and facts.real_tokens_per_sample is None
    if facts.origin == "imported" and masked and batch and seq_len:
        return batch * seq_len
    return _real_tokens(run)
