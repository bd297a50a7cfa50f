"""Log format of modded-nanogpt: `step:20/1750 train_time:2900ms step_avg:145.00ms`.

`train_time` is a running total. Source: `train_gpt.py` of KellerJordan/modded-nanogpt, 2024-2026,
and its forks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from paceline.core.units import MIB
from paceline.engines.log_reading.log_content import (
    LogContent,
    LogFormat,
    decimal_step,
    excerpt,
    numbers,
    whole_numbers,
)
from paceline.engines.log_reading.records import (
    NUMBER,
    RecordColumn,
    Records,
    RunningTotals,
    last_match,
    step_lines,
    store_total_steps,
)

ENDS = b"peak memory "

_STEP = re.compile(
    rb"step:(\d{1,18})/(\d{1,18}) ((?:[a-z_|][^\r\n]{0,160}? )?)train_time:([0-9.]{1,24})(ms|s)"
    rb"(?: \|)? step_avg:"
)
_INCOMPLETE = re.compile(rb"step:\d{1,18}/\d{1,18} (?!.{0,400}step_avg:[0-9na.]{1,24}ms)")
_LOSS = re.compile(rb"(?:train_loss:|\| loss )" + NUMBER + rb"[^\n]*")


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps, counted from 1 on completion; times are differences of `train_time`.

    `step_avg` is the mean since the clock's start and is ignored. Evaluations do not run on that
    clock. Older versions reset it at step 10 and have no time there.
    """
    totals = RunningTotals()
    for text, steps in step_lines(blocks, log, _STEP, ENDS, _INCOMPLETE):
        _read_settings(text, log)
        if not steps:
            continue
        index, lasts, fields, clock, units = steps
        seconds = numbers(clock) / np.where(np.array(units) == b"ms", 1e3, 1.0)
        numbers_of_steps = whole_numbers(index)
        new, (times,) = totals.rates(numbers_of_steps, seconds[None, :])
        columns = Records(fields).columns({"loss": RecordColumn((_LOSS,))})
        columns = {name: column[new] for name, column in columns.items()} | {"step_time_s": times}
        log.add_steps(numbers_of_steps[new], **columns)
        store_total_steps(log, lasts)
        unit_s = decimal_step(clock[-1]) / (1e3 if units[-1] == b"ms" else 1.0)
        log.resolution_s = unit_s / totals.distance


_PEAK = re.compile(
    rb"peak memory (?:allocated|consumption): (\d{1,12}) MiB(?: reserved: (\d{1,12}) MiB)?"
)
_DEVICE = re.compile(
    rb"\| {1,4}(\d{1,3})  ((?:NVIDIA|Tesla|AMD) [^|\n]{2,40}?) {2,40}(?:On|Off|N/A) "
)


def _read_settings(text: bytes, log: LogContent) -> None:
    """Store the settings from the `nvidia-smi` table at the top and from the last line."""
    for allocated, reserved in _PEAK.findall(text):
        log.peak("allocated", int(allocated) * MIB)
        if reserved:
            log.peak("reserved", int(reserved) * MIB)
    if match := last_match(_DEVICE, text):
        log.facts["device"] = excerpt(match[2])
        log.facts["num_devices"] = int(match[1]) + 1


LOG_FORMAT = LogFormat(
    title="modded-nanogpt",
    marks=(b"train_time:",),
    step_line=re.compile(
        rb"step:\d{1,18}/\d{1,18} (?:[a-z_|][^\r\n]{0,160}? )?train_time:[0-9.]{1,24}m?s"
        rb"(?: \|)? step_avg:"
    ),
    read=read,
    example="`step:20/1750 train_time:2900ms step_avg:145.00ms`",
    numbering="from 1",
)
