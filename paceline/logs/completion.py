"""Derived columns of a log's steps: log interval, and step times from printed rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from paceline.core.run import RunSettings
from paceline.core.steps import FloatColumn, IntColumn, Steps
from paceline.engines.log_reading.log_content import LogContent, LogFormat

RATES = ("samples_per_s", "tokens_per_s_per_device")
NO_END_MARKER = "ends without an end marker"
"""Start of the warning about such a log."""
MAX_INTERVAL = 10_000
MIN_REGULAR_SHARE = 0.8
"""Minimum share of equal distances between step numbers for these to count as the log interval."""


def completed_steps(steps: Steps, facts: RunSettings, log: LogContent) -> Steps:
    """Return `steps` with `averaged_over`, and with step times from rates if none are printed.

    t = B / (samples/s), or B s / (n x tokens/s per device). B is the global batch, s the sequence
    length and n the number of devices.
    """
    interval = log_interval(steps.index, log.facts.get("log_interval"))
    steps = replace(steps, averaged_over=np.broadcast_to(np.int64(interval), len(steps)))
    if steps.known("step_time_s") or not len(steps):
        return steps
    times = _times_from_rates(steps, facts)
    return (
        steps if times is None else replace(steps, columns={**steps.columns, "step_time_s": times})
    )


def steps_from_throughput(steps: Steps) -> Steps:
    """Return `steps` with 1 / rate as step time if the log prints only a rate.

    The batch is unknown, so such a time is correct up to a constant factor. That is enough to
    choose a window.
    """
    rate = next((name for name in RATES if steps.known(name)), None)
    if steps.known("step_time_s") or rate is None:
        return steps
    return replace(steps, columns={**steps.columns, "step_time_s": _ratio(1, steps[rate])})


def log_interval(index: IntColumn, reported_interval: object = None) -> int:
    """Return the number of steps that one line averages.

    It is the stated interval if there is one, else the median distance of the step numbers.
    """
    if isinstance(reported_interval, int) and 0 < reported_interval <= MAX_INTERVAL:
        return reported_interval
    if len(index) < 3:
        return 1
    distances = np.diff(index[:10_000])
    usual = int(np.median(distances))
    regular = float((distances == usual).mean()) >= MIN_REGULAR_SHARE
    return usual if regular and 1 < usual <= MAX_INTERVAL else 1


def _times_from_rates(steps: Steps, facts: RunSettings) -> FloatColumn | None:
    batch: FloatColumn | int | None = facts.global_batch
    if steps.known("global_batch"):
        batch = steps["global_batch"]
    if batch is None:
        return None
    if steps.known("samples_per_s"):
        return _ratio(batch, steps["samples_per_s"])
    if steps.known("tokens_per_s_per_device") and facts.seq_len and facts.num_devices:
        tokens = batch * facts.seq_len / facts.num_devices
        return _ratio(tokens, steps["tokens_per_s_per_device"])
    return None


def _ratio(amount: FloatColumn | float, rate: FloatColumn) -> FloatColumn:
    """Return amount / rate, with NaN where the rate is unknown, zero or infinite."""
    ratio = np.full(len(rate), np.nan)
    sound = np.isfinite(rate) & (rate > 0)
    # A single output buffer of a few KiB avoids a copy of each column.
    return np.divide(amount, rate, out=ratio, where=sound, dtype=np.float64)


def missing_end(kind: LogFormat, log: LogContent, steps: Steps) -> Iterator[str]:
    """Yield a warning if a log with steps lacks the end marker of its log format.

    No warning is given if the end shows in another way: the last step, a run time, a torn line or
    an out-of-memory error.
    """
    total = log.facts.get("total_steps")
    # Some log formats number steps from 0, so the last step is total - 1.
    reached_last_step = (
        isinstance(total, int) and len(steps) > 0 and int(steps.index.max()) >= total - 1
    )
    ends = log.end_line or log.incomplete_reason or log.out_of_memory or "run_time_s" in log.figures
    if kind.end_marker and len(steps) and not reached_last_step and not ends:
        yield (
            f"{NO_END_MARKER} ({kind.end_marker}): the run was still "
            "going, was killed, or the log is truncated"
        )
