"""NeMo 1's log: a progress bar, drawn again and again, with the step's figures in its brackets.

Older versions time no step there; then the bar's own rate, which Lightning averages over the whole
run, is the one figure.

Numbers of five digits and more are printed with three where that is shorter: `2e+3`, `2.56e+5`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from paceline.core.steps import FloatColumn, IntColumn
from paceline.engines.log_reading.log_content import (
    EXACT_INTEGERS,
    LogContent,
    LogFormat,
    decimal_step,
    numbers,
    whole_numbers,
)
from paceline.engines.log_reading.nemo_settings import ENDS, NemoSettings
from paceline.engines.log_reading.records import Records, field, note_resolution, watched

__all__ = ["LOG_FORMAT"]

DIGITS = 3
"""Significant digits of every printed figure, whatever its trailing zeros say."""


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
"""A bar that times no step."""

_TORN = re.compile(rb"\d \[\d[^\[\]]{1,60}<[^\[\]]{0,200}, [a-z_]{4,30}=[^\]]{0,3000}\Z")

_INDEX = field(rb"global_step=")
_CONSUMED = field(rb"consumed_samples=")
_FIELDS = {
    "step_time_s": field(_TIME),
    "grad_norm": field(rb"grad_norm="),
    "samples_per_s": field(rb"samples/sec="),
    "reserved_bytes": field(rb"peak_memory_usage="),
}
_BY_BATCH_TIME = re.compile(rb"(batch_time=)[^\n]*samples/sec=[^\n]*")
_LOSS = (field(rb"reduced_train_loss="), field(rb", loss="))


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Steps by their `global_step`, from 0, or by the bar's count; drawn again, the later counts.

    `samples/sec` is of all devices, `peak_memory_usage` the reserved peak in bytes. The batch
    follows from consumed_samples.
    """
    begins = re.compile(_KEY + b"|" + _LOSS_KEY)
    settings, positions, batches = NemoSettings(begins), _Positions(), _Batches(log)
    rate = None
    for block in watched(blocks, log, ENDS, _TORN):
        settings.read(block)
        if _KEY not in block:
            bare = _BARE.findall(_lines_with_bars(block)) if _LOSS_KEY in block else []
            if bare:
                counts, totals, rates, units, fields = zip(*bare, strict=True)
                _add(log, Records(fields), positions, batches, counts, totals)
                rate = rates[-1], units[-1]
            continue
        bars = _BAR.findall(_lines_with_bars(block))
        if bars:
            counts, totals, fields = zip(*bars, strict=True)
            _add(log, Records(fields), positions, batches, counts, totals)
    settings.keep(log)
    positions.keep(log)
    batches.keep(log)
    if rate:
        _keep_rate(log, *rate)


def _keep_rate(log: LogContent, rate: bytes, unit: bytes) -> None:
    """The bar's own rate, where no step is timed."""
    value = numbers([rate]).item()
    if log.steps().known("step_time_s") or not 0 < value < math.inf:
        return
    log.figures["steps_per_s"] = 1 / value if unit == b"s/it" else value
    last = decimal_step(rate)
    log.resolution_s = last if unit == b"s/it" else last / value**2
    log.remark(
        f"no step is timed: {rate.decode()} {unit.decode()} is the bar's mean of all steps so far, "
        "the first ones included"
    )


def _lines_with_bars(block: bytes) -> bytes:
    """The bars of a block, one a line; a printed `^M` stands for a terminal's carriage return."""
    lines = block.replace(b"\r", b"\n").replace(b"^M", b"\n").split(b"\n")
    return b"\n".join([line for line in lines if _KEY in line or _LOSS_KEY in line])


def _add(
    log: LogContent,
    records: Records,
    positions: _Positions,
    batches: _Batches,
    counts: Sequence[bytes],
    totals: Sequence[bytes],
) -> None:
    index = positions.indices(records.texts(_INDEX), counts, totals)
    columns = records.columns(_FIELDS) | records.either({"loss": _LOSS})
    consumed = records.texts(_CONSUMED)
    if consumed is not None:
        columns["global_batch"] = batches.sizes(index, consumed)
    if "samples_per_s" in columns and records.texts(_BY_BATCH_TIME):
        log.remark("samples/sec is of batch_time, which is longer than train_step_timing")
    log.add_steps(index, **columns)
    note_resolution(log, columns, DIGITS)


class _Positions:
    """Step numbers; the bar's count makes up for those that are rounded or not printed."""

    def __init__(self) -> None:
        self._offset: int | None = None
        """global_step less the bar's count, where both were printed exactly."""
        self._last = -1
        self._counted = self._total = self._before = 0

    def indices(
        self, texts: Sequence[bytes] | None, counts: Sequence[bytes], totals: Sequence[bytes]
    ) -> IntColumn:
        """The number of each bar from its `global_step`, its count and the total behind that."""
        texts = [b""] * len(counts) if texts is None else texts
        values, counted = numbers(texts), whole_numbers(counts)
        halves = _half_units(texts, values)
        if self._offset is not None:
            likely = counted + self._offset
            if bool((np.abs(likely - values) <= halves).all()):
                self._last, self._counted = int(likely[-1]), int(counted[-1])
                self._total = int(totals[-1] or 0)
                return likely
        rows = zip(values.tolist(), halves.tolist(), counted.tolist(), totals, strict=True)
        return np.array([self._index_of(*row) for row in rows], dtype=np.int64)

    def keep(self, log: LogContent) -> None:
        """Put the bar's total into the log's facts, where its count is that of the whole run."""
        if self._total and not self._before and abs(self._offset or 0) <= 2:
            log.facts.setdefault("total_steps", self._total)

    def _index_of(self, value: float, half: float, count: int, total: bytes) -> int:
        if count < self._counted == self._total:
            self._before += self._total
        self._counted, self._total = count, int(total or 0)
        if not 0 <= value < EXACT_INTEGERS:
            self._last = count + (self._before if self._offset is None else self._offset)
        elif half == 0:
            self._last = int(value)
            self._offset = self._last - count
        else:
            offset = -1 if self._offset is None else self._offset
            likely = (count + offset, count - 1, count, self._last, self._last + 1)
            self._last = next((n for n in likely if abs(n - value) <= half), int(value))
        return self._last


class _Batches:
    """The global batch from consumed_samples, which counts the samples of the step itself too."""

    def __init__(self, log: LogContent) -> None:
        self._log = log
        self._anchor: tuple[int, float, int] | None = None
        """Step, samples and batch from which the next ones are foretold; batch 0 = not known."""
        self._slack = 0.0
        """Half the unit in which the anchor's samples were printed."""
        self._seen: set[int] = set()

    def sizes(self, index: IntColumn, texts: Sequence[bytes]) -> FloatColumn:
        """The batch of each step; NaN where rounding hides it."""
        consumed = numbers(texts)
        halves = _half_units(texts, consumed)
        if self._anchor is not None and self._anchor[2]:
            step, samples, batch = self._anchor
            foretold = samples + batch * (index - step).astype(np.float64)
            in_order = index[0] >= step and bool((index[1:] >= index[:-1]).all())
            if in_order and bool((np.abs(foretold - consumed) <= halves + self._slack).all()):
                self._anchor = int(index[-1]), foretold[-1].item(), batch
                return np.broadcast_to(np.float64(batch), len(index))
        rows = zip(index.tolist(), consumed.tolist(), halves.tolist(), strict=True)
        return np.array([self._batch_of(*row) for row in rows], dtype=np.float64)

    def keep(self, log: LogContent) -> None:
        """Put the batch into the log's facts if it never changed."""
        if len(self._seen) == 1:
            log.facts.setdefault("global_batch", next(iter(self._seen)))

    def _batch_of(self, index: int, consumed: float, half: float) -> float:
        if not 0 < consumed < EXACT_INTEGERS:
            return math.nan
        if self._anchor is not None and self._anchor[2]:
            step, samples, batch = self._anchor
            foretold = samples + batch * (index - step)
            if index >= step and abs(foretold - consumed) <= half + self._slack:
                self._anchor = index, foretold, batch
                return float(batch)
        batch_size = self._by_difference(index, consumed, half)
        if batch_size is None:
            batch_size = self._by_quotient(index, consumed, half)
        if batch_size is None and half:
            return math.nan
        self._anchor, self._slack = (index, consumed, batch_size or 0), half
        if batch_size is None:
            return math.nan
        if len(self._seen) < 2:
            self._seen.add(batch_size)
        return float(batch_size)

    def _by_difference(self, index: int, consumed: float, half: float) -> int | None:
        """The batch since the last known step, where both are printed in full."""
        if self._anchor is None or half or self._slack:
            return None
        step, samples, _ = self._anchor
        return _whole_quotient(consumed - samples, index - step)

    def _by_quotient(self, index: int, consumed: float, half: float) -> int | None:
        """The batch that has held from the first step on, if the printed digits tell it."""
        batch_size = _whole_quotient(consumed, index + 1) or _whole_quotient(consumed, index)
        if half == 0:
            return batch_size
        if self._anchor is not None and index > self._anchor[0]:
            return None
        if 2 * half < index + 1:
            batch = round(consumed / (index + 1))
            return batch if batch and abs(batch * (index + 1) - consumed) <= half else None
        if batch_size is not None:
            self._log.remark(
                f"global batch {batch_size:,} taken from consumed_samples, of which three digits "
                f"are printed: it may differ by {half / (index + 1):.1f}"
            )
        return batch_size


def _half_units(texts: Sequence[bytes], values: FloatColumn) -> FloatColumn:
    """Half the unit of the third digit of the numbers with an exponent, 0 for the others."""
    halves = np.zeros(len(texts))
    if b"e" in b"".join(texts):
        short = np.fromiter((b"e" in text for text in texts), dtype=np.bool_, count=len(texts))
        short &= (values > 0) & (values < EXACT_INTEGERS)
        halves[short] = 0.5 * 10.0 ** (np.floor(np.log10(values[short])) - DIGITS + 1)
    return halves


def _whole_quotient(amount: float, parts: int) -> int | None:
    """amount / parts where that is a whole number above 0."""
    if parts <= 0 or amount <= 0 or amount % parts:
        return None
    return int(amount) // parts


LOG_FORMAT = LogFormat(
    title="NeMo 1",
    marks=(_KEY, _LOSS_KEY),
    step_line=re.compile(
        _TIME + rb"[0-9]|(?:s/it|it/s), [^\[\]\r\n]{0,600}" + _LOSS_KEY + rb"[0-9nNi-]"
    ),
    read=read,
    end_marker="`Trainer.fit` stopped",
)
