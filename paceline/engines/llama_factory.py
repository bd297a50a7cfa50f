"""Log format of LLaMA-Factory: `trainer_log.jsonl`, one object per log interval.

Its clocks count from the start of training. The terminal shows Hugging Face Trainer's lines.
Source: `train/callbacks.py` of hiyouga/LLaMA-Factory, 2024-2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from paceline.core.steps import FloatColumn
from paceline.core.units import GIB
from paceline.engines.log_reading.log_content import LogContent, LogFormat, numbers, whole_numbers
from paceline.engines.log_reading.records import (
    RecordColumn,
    Records,
    RunningTotals,
    json_field,
    ratio,
    store_total_steps,
    watch_end,
)

ENDS = b'"percentage": 100.0,'
DECIMAL = 0.01
"""Resolution of the printed tokens/s."""

_RECORD = re.compile(
    rb'\{"current_steps": (\d{1,18}), "total_steps": (\d{1,18}), ("loss": [^{}\r\n]{1,4000})\}'
)
_INCOMPLETE = re.compile(rb'\{"current_steps": [^{}]{0,4000}\Z')
_COLUMNS = {
    "loss": RecordColumn((json_field(rb"loss"),)),
    "grad_norm": RecordColumn((json_field(rb"grad_norm"),)),
    "allocated_bytes": RecordColumn((json_field(rb"vram_allocated"),), GIB),
    "reserved_bytes": RecordColumn((json_field(rb"vram_reserved"),), GIB),
    "total_tokens": RecordColumn((json_field(rb"total_tokens"),)),
    "throughput": RecordColumn((json_field(rb"throughput"),)),
}
_CLOCK = re.compile(rb'"elapsed_time": "((?:\d{1,5} days?, )?\d{1,2}:\d\d:\d\d)"[^\n]*')


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps, numbered from 1.

    `throughput` is the mean since the start, so it is not used as a rate.

    Tokens divided by that mean are the elapsed seconds, more precise than `elapsed_time`, which is
    in whole seconds. Records without a loss (evaluations and the end) are skipped.
    """
    totals = RunningTotals(3)
    for block in watch_end(blocks, log, ENDS, _INCOMPLETE):
        steps = _RECORD.findall(block)
        if not steps:
            continue
        index, lasts, fields = zip(*steps, strict=True)
        records = Records(fields)
        columns = records.columns(_COLUMNS)
        unknown = np.full(len(index), np.nan)
        tokens, rates = (columns.pop(name, unknown) for name in ("total_tokens", "throughput"))
        fine_s, clock_s = ratio(tokens, rates), _seconds(records, len(index))
        numbers_of_steps = whole_numbers(index)
        new, (fine, whole, per_step) = totals.rates(
            numbers_of_steps, np.stack([fine_s, clock_s, tokens])
        )
        columns = {name: column[new] for name, column in columns.items()}
        columns["step_time_s"] = np.where(np.isnan(fine), whole, fine)
        columns["tokens"] = per_step
        log.add_steps(numbers_of_steps[new], **columns)
        store_total_steps(log, lasts)
        is_fine = bool(np.isfinite(fine_s[-1]))
        unit_s = DECIMAL * float(fine_s[-1] / rates[-1]) if is_fine else 1.0
        log.resolution_s = unit_s / totals.distance


def _seconds(records: Records, length: int) -> FloatColumn:
    """Return `1 day, 2:03:04` in seconds; NaN without a printed clock."""
    return numbers([_clock(text) for text in records.texts(_CLOCK) or [b""] * length])


def _clock(text: bytes) -> bytes:
    if not text:
        return text
    days, _, time = text.rpartition(b" ")
    hours, minutes, seconds = map(int, time.split(b":"))
    whole_days = int(days.split()[0]) if days else 0
    return b"%d" % (86400 * whole_days + 3600 * hours + 60 * minutes + seconds)


LOG_FORMAT = LogFormat(
    title="LLaMA-Factory",
    marks=(b'{"current_steps": ',),
    step_line=re.compile(
        rb'\{"current_steps": \d{1,18}, "total_steps": \d{1,18}, "loss": [-0-9NI]'
    ),
    read=read,
    example='`{"current_steps": 10, "total_steps": 100, "loss": ...}`',
    numbering="from 1",
)
