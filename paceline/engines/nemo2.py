"""Log format of NeMo 2: one line per step, fields separated by `|`, printed by rank 0.

The printer may average over several steps; then the step numbers are that far apart. It is not a
table, because a terminal may wrap a record at any place, and two counters give the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from paceline.core.steps import IntColumn
from paceline.core.units import TERA
from paceline.engines.log_reading.log_content import (
    EXACT_INTEGERS,
    LogContent,
    LogFormat,
    numbers,
    whole_numbers,
)
from paceline.engines.log_reading.nemo_settings import ENDS, NemoSettings
from paceline.engines.log_reading.records import Records, column, field, note_resolution, watch_end

DIGITS = 4
"""Significant digits of every number; trailing zeros are omitted."""

MAX_LINES = 16
"""Maximum number of lines per record."""

_BEGIN = b"Training epoch "
_STEP = re.compile(rb"iteration (\d{1,18})/(\d{1,18}) \| ((?=[A-Za-z_]{2,40}: ).*)")
_INCOMPLETE = re.compile(
    rb"iteration \d{1,18}/\d{1,18} \|(?!.{0,4000}train_step_timing in s: [0-9])"
)

_FIELD = rb" \| [A-Za-z_][\w ]{1,40}: -?(?:[0-9][0-9.eE+-]{0,24}|nan|inf)"
_WHOLE = re.compile(rb"\d{1,9}, iteration \d{1,18}/\d{1,18}(?:" + _FIELD + rb"){2,40} ?")
_CONTINUATION = re.compile(
    rb"^ ?(?:\||:|[0-9.eE+-]{1,24}(?: ?\||$)|[A-Za-z_][\w ]{0,40}: -?[0-9.])", re.MULTILINE
)
"""Line that may continue the record of the previous line."""

_GLOBAL_STEP = field(rb"global_step: ")
_COLUMNS = {
    "step_time_s": column(rb"train_step_timing in s: "),
    "loss": column(rb"reduced_train_loss: "),
    "grad_norm": column(rb"grad_norm: "),
    "global_batch": column(rb"global_batch_size: "),
    "tokens_per_s_per_device": column(rb"tokens_per_sec_per_gpu: "),
    "allocated_bytes": column(rb"max_memory_allocated: "),
    "reserved_bytes": column(rb"max_memory_reserved: ", rb"peak_memory_usage: "),
    "flops_per_s_per_device": column(rb"TFLOPS_per_GPU: ", scale=TERA),
}


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps by `global_step`, from 0; in the first epoch `iteration` is the same.

    `TFLOPS_per_GPU` is per device. `peak_memory_usage` is the older name of the reserved peak;
    `memory_allocated` next to it is not a peak and is ignored.
    """
    settings = NemoSettings(_STEP)
    for block in watch_end(blocks, log, ENDS, _INCOMPLETE):
        settings.read(block)
        # Output of other processes may precede a record without a line end.
        text = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(_BEGIN, b"\n" + _BEGIN)
        steps = _STEP.findall(_unwrap(text))
        if not steps:
            continue
        iterations, lasts, fields = zip(*steps, strict=True)
        records = Records(fields)
        columns = records.columns(_COLUMNS)
        index = _index(records.texts(_GLOBAL_STEP), iterations)
        log.add_steps(index, **columns)
        from_zero = int(iterations[-1]) <= int(index[-1])
        log.facts["total_steps"] = max(1, int(lasts[-1]) + from_zero)
        note_resolution(log, columns, DIGITS)
    settings.keep(log)


def _unwrap(text: bytes) -> bytes:
    """Return `text` with every record that a terminal has wrapped on one line."""
    if not _CONTINUATION.search(text):
        return text
    first, *records = text.split(_BEGIN)
    return first + b"".join(_BEGIN + _join(record) for record in records)


def _join(record: bytes) -> bytes:
    """Return a record and the text after it, with lines joined that form whole fields."""
    lines = record.split(b"\n", MAX_LINES)
    for n in range(len(lines), 1, -1):
        for space in (b"", b" "):
            text = space.join(lines[:n])
            if _WHOLE.fullmatch(text):
                return b"\n".join([text, *lines[n:], b""])
    return record


def _index(steps: Sequence[bytes] | None, iterations: Sequence[bytes]) -> IntColumn:
    """Return the number of each step; `iteration` restarts per epoch, `global_step` does not."""
    iteration_numbers = whole_numbers(iterations)
    if steps is None:
        return iteration_numbers
    values = numbers(steps)
    sound = (values >= 0) & (values < EXACT_INTEGERS)
    return np.where(sound, np.where(sound, values, 0).astype(np.int64), iteration_numbers)


LOG_FORMAT = LogFormat(
    title="NeMo 2",
    marks=(b"reduced_train_loss: ", b"train_step_timing in s: "),
    step_line=re.compile(
        rb"iteration \d{1,18}/\d{1,18} \| [^}{]{0,400}?"
        rb"(?:reduced_train_loss|train_step_timing in s): "
    ),
    read=read,
    example="`iteration 45/99 | ... | train_step_timing in s: 6.08`",
    numbering="from 0",
    end_marker="`Trainer.fit` stopped",
    convention="full-attention",
    begins=_BEGIN,
)
