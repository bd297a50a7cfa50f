"""Log format of verl: `step:1 - actor/pg_loss:0.01 - ... - perf/throughput:3283.3` per step.

Source: `utils/logger/aggregate_logger.py`, `trainer/ppo/metric_utils.py` and the SFT trainers of
volcengine/verl, 2024-2026.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from paceline.core.steps import FloatColumn
from paceline.core.units import GIB
from paceline.engines.log_reading.log_content import (
    LogContent,
    LogFormat,
    whole_numbers,
)
from paceline.engines.log_reading.records import (
    Records,
    column,
    note_decimals,
    ratio,
    watch_end,
    without_colors,
)

CERTAIN = 0.1
"""Maximum distance of a ratio of two rates from the whole number that it represents."""

MAX_DEVICES = 1 << 20


def device_count(of_all: float, of_one: float) -> int | None:
    """Return the whole number nearest to of_all / of_one, or None if it is ambiguous."""
    if not (0 < of_all < 1e100 and 0 < of_one < 1e100):
        return None
    quotient = of_all / of_one
    if not 0.5 < quotient < MAX_DEVICES or not math.isfinite(quotient):
        return None
    count = round(quotient)
    return count if abs(quotient - count) <= CERTAIN else None


ENDS = b"Final validation metrics"

_STEP = re.compile(rb"step:(\d{1,18}) - ([^\r\n]*)")
_INCOMPLETE = re.compile(
    rb"step:\d{1,18} - (?!.{0,60000} - (?:perf/throughput|train/time\(s\)):[0-9])"
)
_NUMPY = re.compile(rb":np\.\w{2,12}\(([^()\s]{1,40})\)")
_TIMES = column(rb" - perf/time_per_step:", rb" - timing_s/step:", rb" - train/time\(s\):")
_COLUMNS = {
    "step_time_s": _TIMES,
    "loss": column(rb" - actor/pg_loss:", rb" - train/loss:"),
    "grad_norm": column(rb" - actor/grad_norm:", rb" - train/grad_norm:"),
    "tokens": column(rb" - perf/total_num_tokens:", rb" - train/global_tokens:"),
    "tokens_per_s_per_device": column(rb" - perf/throughput:"),
    "mfu": column(rb" - train/mfu:"),
    "allocated_bytes": column(rb" - perf/max_memory_allocated_gb:", scale=GIB),
    "reserved_bytes": column(rb" - perf/max_memory_reserved_gb:", scale=GIB),
}
_PHASE_MFU = re.compile(rb" - perf/mfu/([\w/]{1,40}):([0-9]{1,9}(?:\.[0-9]{1,18})?)(?![\w.])")
_TIMED = re.compile(rb" - (?:perf/time_per_step|timing_s/step|train/time\(s\)):")

WHOLE_STEP_REMARK = (
    "the time of a reinforcement learning step includes generation and update, and its tokens are "
    "prompts and responses; the printed MFU of single phases is ignored"
)


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps, numbered from 1; tokens/s are per device and whole step, including generation.

    Lines of validations have no time and are skipped.
    """
    largest_mfu, phase = 0.0, b""
    for block in watch_end(blocks, log, ENDS, _INCOMPLETE):
        text = without_colors(block)
        text = _NUMPY.sub(rb":\1", text) if b":np." in text else text
        steps = [
            (number, b" - " + fields)
            for number, fields in _STEP.findall(text)
            if _TIMED.search(b" - " + fields)
        ]
        if not steps:
            continue
        index, fields = zip(*steps, strict=True)
        records = Records(fields)
        columns = records.columns(_COLUMNS)
        log.add_steps(whole_numbers(index), **columns)
        _count_devices(columns, log)
        if "tokens_per_s_per_device" in columns:
            log.remark(WHOLE_STEP_REMARK)
        note_decimals(log, records.either_texts(_TIMES.patterns))
        for name, share in _PHASE_MFU.findall(b"".join(fields)):
            largest_mfu, phase = max((largest_mfu, phase), (float(share), name))
    if largest_mfu > 1:
        log.remark(
            f"the log prints an MFU of {largest_mfu:.1%} for {phase.decode()}, more than a device "
            "can reach: its FLOPs or its peak are wrong"
        )


def _count_devices(columns: dict[str, FloatColumn], log: LogContent) -> None:
    """Store the device count (tokens / seconds / tokens/s per device) from the first clear step."""
    names = ("tokens", "step_time_s", "tokens_per_s_per_device")
    if "num_devices" in log.facts or not all(name in columns for name in names):
        return
    tokens, times, of_one = (columns[name] for name in names)
    for all_rate, one_rate in zip(ratio(tokens, times), of_one, strict=True):
        count = device_count(float(all_rate), float(one_rate))
        if count is not None:
            log.facts["num_devices"] = count
            return


LOG_FORMAT = LogFormat(
    title="verl",
    marks=(b" - perf/time_per_step:", b" - timing_s/step:", b" - train/time(s):"),
    step_line=re.compile(
        rb" - (?:perf/time_per_step|timing_s/step|train/time\(s\)):(?:np\.\w{2,12}\()?[0-9]"
    ),
    read=read,
    example="`step:1 - actor/pg_loss:... - perf/time_per_step:48.7`",
    numbering="from 1",
)
