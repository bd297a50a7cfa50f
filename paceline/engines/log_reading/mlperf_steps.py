"""Step times, throughputs and losses in MLPerf result lines.

They are in `tracked_stats` (losses also in `train_loss`), whose content no rule defines. A step
time is that of a single step if the line has both `step` and `samples_count`, or (since round 6.0)
the step's own `reduced_train_loss` and `samples_count`. Otherwise it is, like a throughput, the
mean of the block since the last evaluation. One log may contain both, from different ranks. A
throughput has no stated unit, so the times of blocks without a step time come from their interval
lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf, isfinite, nan
from typing import Any, cast

import numpy as np

from paceline.core.steps import FloatColumn
from paceline.core.units import significant
from paceline.engines.log_reading.log_content import LogContent, numbers, whole_numbers
from paceline.engines.log_reading.mllog import TOKEN, MlRecord, number
from paceline.engines.log_reading.mlperf_intervals import TrainingInterval

ROWS_PER_BLOCK = 4096
MAX_ENDS = 10_000
OUTSIDE = 0.03
"""Part of an interval outside its steps, relative to the steps, above which it is remarked."""
LARGEST_STEP = 1 << 62
LOSSES = ("train_loss", "reduced_train_loss")

_NUMBER = rb"([-+0-9.eE]{1,24}|NaN|-?Infinity)"
_STEP = rb'(?:, "step": (\d{1,15})(?:\.0)?)?'
_HEAD = (
    rb'\{"namespace": "[^"\\\r\n]{0,64}+", "time_ms": \d{1,16}, "event_type": "POINT_IN_TIME", '
    rb'"key": "(?:tracked_stats|train_loss)", "value": '
)
_METADATA = rb', "metadata": \{"file": "[^"\\\r\n]{0,512}+", "lineno": \d{1,9}'
_SINGLE = re.compile(
    TOKEN
    + _HEAD
    + rb'\{"train_step_time": '
    + _NUMBER
    + rb', "reduced_train_loss": '
    + _NUMBER
    + rb"\}"
    + _METADATA
    + rb', "step": (\d{1,15})(?:\.0)?, "samples_count": \d{1,15}(?:\.0)?\}\}'
)
_USUAL = re.compile(
    _HEAD
    + rb'(?:\{(?:"throughput": '
    + _NUMBER
    + rb'(?:, )?)?(?:"train_step_time": '
    + _NUMBER
    + rb'(?:, )?)?(?:"train_loss": '
    + _NUMBER
    + rb')?(?:"max_memory_usage": [0-9.]{1,24})?\}|'
    + _NUMBER
    + rb")"
    + _METADATA
    + _STEP
    + rb'(?:, "samples_count": (\d{1,15})(?:\.0)?)?'
    rb'(?:, "lr": [0-9.e-]{1,24})?' + _STEP + rb"\}\}"
)
"""Usual form of these lines: many times faster to match than JSON is to decode."""

Place = tuple[int | None, int | None]
"""Step and samples as stated in a line."""


class StepLines:
    """Collector of one run's rows; single steps take precedence over means."""

    def __init__(self) -> None:
        self.has_speed = False
        """True once any speed has been reported."""
        self.blocks = _Blocks()
        self._single = LogContent()
        self._counted = 0
        self._rows: list[tuple[bytes, bytes, bytes]] = []

    def single_steps(self, block: bytes) -> bytes:
        """Add single steps in the usual form; return the rest of the block."""
        if b'"reduced_train_loss"' not in block:
            return block
        parts = _SINGLE.split(block)
        if len(parts) > 1:
            self._flush()
            times, losses, steps = (parts[group::4] for group in (1, 2, 3))
            self._add_single(steps, times, losses)
        return b"".join(parts[::4])

    def read(self, text: bytes) -> bool:
        """Add a mean or a loss in the usual form; return False for any other line."""
        match = _USUAL.match(text)
        if match is None:
            return False
        rate, time, loss, plain, early_step, samples, late_step = match.groups()
        step = early_step or late_step
        if time and step and samples:
            self._begin_single(step, time, loss or b"")
            return True
        place = int(step) if step else None, int(samples) if samples else None
        self._take(place, _value(time), _value(rate), _value(loss or plain))
        return True

    def take(self, record: MlRecord) -> None:
        """Add a decoded line."""
        place = record.count("step"), record.count("samples_count")
        stats = _object(record.value)
        time, rate = number(stats.get("train_step_time")), number(stats.get("throughput"))
        loss = next((number(stats[name]) for name in LOSSES if name in stats), None)
        if record.key == "train_loss":
            loss = number(cast("object", record.value))
        step, samples = place
        if step is None and samples is not None and "reduced_train_loss" in stats:
            step = self._step_at(samples)
        if time is not None and step is not None and samples is not None:
            self._begin_single(b"%d" % step, _text(time), _text(loss))
        else:
            self._take(place, *(nan if value is None else value for value in (time, rate, loss)))

    def keep(self, log: LogContent) -> None:
        """Store the better series in the log, with the number of steps per line."""
        self._flush()
        self.blocks.end_run(log)
        series = self._single if len(self._single) else self.blocks.log
        interval = 1 if series is self._single else self.blocks.usual_length
        log.take_steps(series)
        if doubt := self.blocks.time_outside(series.column("step_time_s")):
            log.remark(doubt)
        if interval:
            log.facts["log_interval"] = interval

    def _step_at(self, samples: int) -> int:
        """Return a step's number from its samples; without a batch size, count the steps."""
        self._counted += 1
        batch = self.blocks.global_batch
        return samples // batch if batch else self._counted

    def _begin_single(self, step: bytes, time: bytes, loss: bytes) -> None:
        self.has_speed = True
        self._rows.append((step, time, loss))
        if len(self._rows) >= ROWS_PER_BLOCK:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._add_single(*zip(*self._rows, strict=True))
            self._rows.clear()

    def _add_single(
        self, steps: Sequence[bytes], times: Sequence[bytes], losses: Sequence[bytes]
    ) -> None:
        self.has_speed = True
        self._single.add_steps(
            whole_numbers(steps), step_time_s=numbers(times), loss=numbers(losses)
        )

    def _take(self, place: Place, time: float, rate: float, loss: float) -> None:
        if time == time or rate == rate:
            self.has_speed = True
            self.blocks.begin(place, time, rate)
        elif loss == loss:
            self.blocks.add_loss(place, loss)


class _Blocks:
    """Means of blocks between evaluations, and losses, which are printed more often."""

    def __init__(self) -> None:
        self.log = LogContent()
        self.global_batch: int | None = None
        self._rows: list[tuple[int, float, float, float]] = []
        self._mean: tuple[Place, float, float] | None = None
        self._ends: list[int] = []
        self._end = self._samples = 0
        self._has_rates = False
        self._seconds = self._steps = 0.0

    @property
    def usual_length(self) -> int | None:
        """Median number of steps per block; the first may be longer, as evaluation starts late."""
        return int(np.median(np.diff(self._ends, prepend=0))) if self._ends else None

    @property
    def rate(self) -> float:
        """Throughput printed since the last evaluation, or NaN."""
        return self._mean[2] if self._mean else nan

    def add_loss(self, place: Place, loss: float) -> None:
        """Add a loss if its step is known."""
        step = self.step_of(place)
        if step is not None:
            self._add(step, nan, nan, loss)

    def begin(self, place: Place, step_time_s: float, rate: float) -> None:
        """Start a block's mean, whose last step is certain only after the next evaluation."""
        self.end(None)
        self._mean = place, step_time_s, rate

    def end(self, evaluation: Place | None, interval: TrainingInterval | None = None) -> None:
        """Add the pending mean at the step of `evaluation`, or at its own estimate if None.

        A mean without a step time gets that of the block's `interval`.
        """
        if self._mean is None and interval is None:
            return
        place, step_time_s, rate = self._mean or ((None, None), nan, nan)
        self._mean = None
        if interval and self.global_batch:
            self._seconds += interval.seconds
            self._steps += interval.samples / self.global_batch
            self._has_rates |= rate == rate
            evaluation = None, interval.end
            if step_time_s != step_time_s:
                step_time_s = interval.seconds * self.global_batch / interval.samples
        step = self.step_of(evaluation) if evaluation else self._own_step(place)
        self._end = self._end + 1 if step is None else step
        if len(self._ends) < MAX_ENDS:
            self._ends.append(min(self._end, LARGEST_STEP))
        self._add(self._end, step_time_s, rate, nan)

    def end_run(self, log: LogContent) -> None:
        """Add what is pending.

        After all intervals, a throughput is that of the run, or of an epoch that was not finished.
        """
        if self._seconds and self._mean and self._mean[1] != self._mean[1]:
            if not self._has_rates:
                log.figures["samples_per_s"] = self._mean[2]
            self._mean = None
        self.end(None)
        self.flush()

    def time_outside(self, step_times_s: FloatColumn) -> str | None:
        """Return a sentence if the intervals are longer than the printed times of their steps."""
        if not self._steps or np.isnan(step_times_s).all():
            return None
        per_step, printed = self._seconds / self._steps, float(np.nanmean(step_times_s))
        if per_step < printed * (1 + OUTSIDE):
            return None
        return (
            f"between the evaluations a step takes {significant(per_step, 4)} s, "
            f"{per_step / printed - 1:.0%} more than the printed step times: the rest of the time "
            "is outside the steps"
        )

    def step_of(self, place: Place) -> int | None:
        """Return the step number in a line, or the one derived from its samples."""
        step, samples = place
        if step is None and samples is not None and self.global_batch:
            return samples // self.global_batch
        return step

    def flush(self) -> None:
        """Move the buffered rows into columns."""
        if self._rows:
            index, times, rates, losses = zip(*self._rows, strict=True)
            self.log.add_steps(
                np.array(index, dtype=np.int64),
                step_time_s=np.array(times),
                samples_per_s=np.array(rates),
                loss=np.array(losses),
            )
            self._rows.clear()

    def _own_step(self, place: Place) -> int | None:
        """Return the step in the mean's line: its step, or its samples (total or per block)."""
        samples = place[1]
        if samples is None or not self.global_batch:
            return self.step_of(place)
        self._samples = samples if samples > self._samples else self._samples + samples
        return self._samples // self.global_batch

    def _add(self, step: int, time: float, rate: float, loss: float) -> None:
        """Add a row; a mean and a loss of the same step share a row."""
        step = min(step, LARGEST_STEP)
        if self._rows and self._rows[-1][0] == step:
            _, old_time, old_rate, old_loss = self._rows[-1]
            self._rows[-1] = (
                step,
                _newer(time, old_time),
                _newer(rate, old_rate),
                _newer(loss, old_loss),
            )
            return
        if len(self._rows) >= ROWS_PER_BLOCK:
            self.flush()
        self._rows.append((step, time, rate, loss))


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _newer(new: float, old: float) -> float:
    return old if new != new else new


def _value(text: bytes | None) -> float:
    """Return a printed number: infinity for a printed NaN, NaN if absent."""
    if text is None:
        return nan
    try:
        value = float(text)
    except ValueError:
        return nan
    return value if isfinite(value) else inf


def _text(value: float | None) -> bytes:
    return b"" if value is None else repr(value).encode("ascii")
