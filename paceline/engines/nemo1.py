"""Log format of NeMo 1: a progress bar, redrawn each step, with the step's figures in brackets.

Older versions have no step times there. Then the only figure is the bar's own rate, which Lightning
averages over the whole run.

Numbers of five or more digits are printed with three if that is shorter: `2e+3`, `2.56e+5`. The
bar's own count replaces such a step number; such sample counts do not determine the batch. A table
cannot express that, nor the rate of the whole run as the only figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from paceline.core.steps import IntColumn
from paceline.engines.log_reading.log_content import (
    LogContent,
    LogFormat,
    decimal_step,
    numbers,
)
from paceline.engines.log_reading.nemo_settings import ENDS, NemoSettings
from paceline.engines.log_reading.records import Records, column, field, note_resolution, watch_end

DIGITS = 3
"""Significant digits of every printed number, regardless of trailing zeros."""
MAX_DIGITS = 15
"""Maximum number of digits of a count that 64-bit floats represent exactly."""

_KEY = b"train_step_timing"
_LOSS_KEY = b"reduced_train_loss="
_TIME = _KEY + rb"[^=,\]\n]{0,8}="
_BAR = re.compile(
    rb"(\d\d{0,11}+)(?:/(\d{1,12}+)|it)? \[([^\[\]\n]{0,3000}" + _TIME + rb"[^\[\]\n]{1,600})\]"
)
_BARE = re.compile(
    rb"(\d\d{0,11}+)(?:/(\d{1,12}+)|it)? \[[0-9:]{4,12}<[^,\[\]\n]{1,24}, {1,4}"
    rb"([0-9.]{1,12})(s/it|it/s)(, [^\[\]\n]{0,600}" + _LOSS_KEY + rb"[^\[\]\n]{1,600})\]"
)
"""Pattern of a bar without a step time."""

_INCOMPLETE = re.compile(rb"\d \[\d[^\[\]]{1,60}<[^\[\]]{0,200}, [a-z_]{4,30}=[^\]]{0,3000}\Z")

_INDEX = field(rb"global_step=")
_CONSUMED = field(rb"consumed_samples=")
_COLUMNS = {
    "step_time_s": column(_TIME),
    "grad_norm": column(rb"grad_norm="),
    "samples_per_s": column(rb"samples/sec="),
    "reserved_bytes": column(rb"peak_memory_usage="),
    "loss": column(rb"reduced_train_loss=", rb", loss="),
}
_BY_BATCH_TIME = re.compile(rb"(batch_time=)[^\n]*samples/sec=[^\n]*")


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps by `global_step`, from 0, or by the bar's count; the last redraw of a step wins.

    `samples/sec` is of all devices, `peak_memory_usage` the reserved peak in bytes. The batch
    follows from consumed_samples.
    """
    begins = re.compile(_KEY + b"|" + _LOSS_KEY)
    settings, positions, batch = NemoSettings(begins), _Positions(), _Batch()
    rate = None
    for block in watch_end(blocks, log, ENDS, _INCOMPLETE):
        settings.read(block)
        if _KEY not in block:
            bare = _BARE.findall(_lines_with_bars(block)) if _LOSS_KEY in block else []
            if bare:
                counts, totals, rates, units, fields = zip(*bare, strict=True)
                _add(log, Records(fields), positions, batch, counts, totals)
                rate = rates[-1], units[-1]
            continue
        bars = _BAR.findall(_lines_with_bars(block))
        if bars:
            counts, totals, fields = zip(*bars, strict=True)
            _add(log, Records(fields), positions, batch, counts, totals)
    settings.keep(log)
    positions.keep(log)
    batch.keep(log)
    if rate:
        _keep_rate(log, *rate)


def _keep_rate(log: LogContent, rate: bytes, unit: bytes) -> None:
    """Store the bar's own rate if no step has a time."""
    value = numbers([rate]).item()
    if log.steps().known("step_time_s") or not 0 < value < math.inf:
        return
    log.figures["steps_per_s"] = 1 / value if unit == b"s/it" else value
    last = decimal_step(rate)
    log.resolution_s = last if unit == b"s/it" else last / value**2
    log.remark(
        f"the log has no step times: {rate.decode()} {unit.decode()} is the bar's mean over all "
        "steps, including the first ones"
    )


def _lines_with_bars(block: bytes) -> bytes:
    """Return the bars of a block, one per line; a printed `^M` counts as a carriage return."""
    lines = block.replace(b"\r", b"\n").replace(b"^M", b"\n").split(b"\n")
    return b"\n".join([line for line in lines if _KEY in line or _LOSS_KEY in line])


def _add(
    log: LogContent,
    records: Records,
    positions: _Positions,
    batch: _Batch,
    counts: Sequence[bytes],
    totals: Sequence[bytes],
) -> None:
    index = positions.indices(records.texts(_INDEX), counts, totals)
    columns = records.columns(_COLUMNS)
    sample_counts = records.texts(_CONSUMED)
    if sample_counts is not None:
        batch.read(index, sample_counts)
    if "samples_per_s" in columns and records.texts(_BY_BATCH_TIME):
        log.remark("samples/sec is based on batch_time, which is longer than train_step_timing")
    log.add_steps(index, **columns)
    note_resolution(log, columns, DIGITS)


class _Positions:
    """Step numbers; the bar's count replaces those that are rounded or not printed."""

    def __init__(self) -> None:
        self._offset: int | None = None
        """Difference of global_step and the bar's count, from a bar with both printed exactly."""
        self._count = self._total = self._before = 0

    def indices(
        self, texts: Sequence[bytes] | None, counts: Sequence[bytes], totals: Sequence[bytes]
    ) -> IntColumn:
        """Return the number of each bar from its `global_step`, else from its count.

        `totals` are the steps per epoch, after which the count restarts.
        """
        texts = [b""] * len(counts) if texts is None else texts
        return np.array(list(map(self._index_of, texts, counts, totals)), dtype=np.int64)

    def keep(self, log: LogContent) -> None:
        """Store the bar's total as a fact if its count covers the whole run."""
        if self._total and not self._before and abs(self._offset or 0) <= 2:
            log.facts.setdefault("total_steps", self._total)

    def _index_of(self, text: bytes, count_text: bytes, total: bytes) -> int:
        count = int(count_text)
        if count < self._count == self._total:
            self._before += self._total
        self._count, self._total = count, int(total or 0)
        step = _exact(text)
        if step is not None:
            self._offset = step - self._before - count
            return step
        usual = -1 if text else 0
        return self._before + count + (usual if self._offset is None else self._offset)


class _Batch:
    """Global batch from consumed_samples, which includes the samples of the step itself.

    Samples printed with three digits do not determine a batch.
    """

    def __init__(self) -> None:
        self._step = self._samples = 0
        """Step and samples of the last bar that printed both exactly."""
        self._batches: set[int] = set()

    def read(self, index: IntColumn, texts: Sequence[bytes]) -> None:
        """Read the samples of these steps; ignored after two different batches."""
        for step, text in zip(index.tolist(), texts, strict=True):
            samples = _exact(text) if len(self._batches) < 2 else None
            if samples:
                batch = self._batch(step, samples)
                self._batches.update([] if batch is None else [batch])
                self._step, self._samples = step, samples

    def keep(self, log: LogContent) -> None:
        """Store the batch as a fact if it never changed."""
        if len(self._batches) == 1:
            log.facts.setdefault("global_batch", next(iter(self._batches)))

    def _batch(self, step: int, samples: int) -> int | None:
        """Return the samples of a step, since the last bar or since the first step of training."""
        if not self._samples or step < self._step:
            whole = _whole_quotient(samples, step + 1)
            return _whole_quotient(samples, step) if whole is None else whole
        return _whole_quotient(samples - self._samples, step - self._step)


def _whole_quotient(amount: int, parts: int) -> int | None:
    """Return amount / parts if that is a whole number above 0, else None."""
    return amount // parts if parts > 0 and amount > 0 and amount % parts == 0 else None


def _exact(text: bytes) -> int | None:
    """Return a count that is printed in full, as `1023.0`; None for `1.02e+3` and other texts."""
    whole, _, decimals = text.partition(b".")
    if not whole.isdigit() or len(whole) > MAX_DIGITS or decimals.strip(b"0"):
        return None
    return int(whole)


LOG_FORMAT = LogFormat(
    title="NeMo 1",
    marks=(_KEY, _LOSS_KEY),
    step_line=re.compile(
        _TIME + rb"[0-9]|(?:s/it|it/s), [^\[\]\r\n]{0,600}" + _LOSS_KEY + rb"[0-9nNi-]"
    ),
    read=read,
    example="progress bar with `train_step_timing in s=12.34`, else its `41.2s/it`",
    numbering="`global_step`",
    end_marker="`Trainer.fit` stopped",
)
