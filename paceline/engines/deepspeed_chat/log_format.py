"""Log format of DeepSpeed-Chat, as written by upstream and by Lambda's benchmark.

It reports speed in up to five ways: Lambda's single throughput of all timed steps, the
reinforcement learning engine's line per step, the performance line per step, DeepSpeed's breakdown
of each step, and DeepSpeed's own timer every tenth step. The most specific one provides the steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from paceline.core.steps import FloatColumn, IntColumn
from paceline.core.units import GIB, TERA, verb_form
from paceline.engines.log_reading.deepspeed_settings import DeepSpeedSettings
from paceline.engines.log_reading.log_content import (
    LogContent,
    LogFormat,
    decimal_step,
    numbers,
    whole_numbers,
)
from paceline.engines.log_reading.records import NUMBER, watch_end

MAX_RESULTS = 1000
MILLISECOND = 1e-3

_MEMORY = rb"(?:, MemAllocated=" + NUMBER + rb"GB, MaxMemAllocated=" + NUMBER + rb"GB)?"
_TIMER = re.compile(
    rb"global_step=(\d{1,18}), RunningAvgSamplesPerSec="
    + NUMBER
    + rb", CurrSamplesPerSec="
    + NUMBER
    + rb"\b"
    + _MEMORY
)
_OLD_TIMER = re.compile(
    rb"[0-9]/(\d{1,18}), (?:RunningAvg)?SamplesPerSec="
    + NUMBER
    + rb"(?:, CurrSamplesPerSec="
    + NUMBER
    + rb")?"
    + _MEMORY
)
_OLD_MARKS = (b", SamplesPerSec=", b", RunningAvgSamplesPerSec=")
_RLHF = re.compile(
    rb"\|(?:act_loss: " + NUMBER + rb"|E2E latency=" + NUMBER + rb"s (?:\|[^|\n\r]{0,60}+){0,8}?"
    rb"(?:\|CurSamplesPerSec=" + NUMBER + rb" (?:\|AvgSamplesPerSec=" + NUMBER + rb")?|[\n\r]))"
)
_PERF = re.compile(
    rb"(?:Rank: 0, loss = "
    + NUMBER
    + rb"|Latency: "
    + NUMBER
    + rb"s, TFLOPs: "
    + NUMBER
    + rb", Samples/sec: "
    + NUMBER
    + rb", Time/seq [^,\n\r]{1,30}, Batch Size: (\d{1,12})"
    rb", (Total Seq\.|Sequence) Length: (\d{0,12}))"
)
_MILLISECONDS = rb"(\d{1,12}\.\d\d)"
_BREAKDOWN = re.compile(
    rb"time \(ms\) \| (?:fwd|forward): "
    + _MILLISECONDS
    + rb" \| (?:bwd|backward): "
    + _MILLISECONDS
    + rb"(?: \| (?:bwd|backward)_\w{1,20}: [0-9.]{1,24}){0,3} \| step: "
    + _MILLISECONDS
)
_SKIPPED = re.compile(rb"step=(\d{1,18}), skipped=(\d{1,18})")
_TIME = re.compile(rb"Execution time: " + NUMBER + rb" seconds for (\d{1,18}) steps")
_THROUGHPUT = re.compile(rb"Throughput: " + NUMBER + rb" samples/sec")
_FIGURE = re.compile(rb"(?:Throughput: |SamplesPerSec=|Samples/sec: |E2E latency=)[0-9.]{1,24}")
_INCOMPLETE = re.compile(
    rb"RunningAvgSamplesPerSec=(?![^\n]{0,200}MaxMemAllocated=[0-9.]{1,24}GB)"
    rb"|\|E2E latency=(?![^\n]{0,400}AvgSamplesPerSec=)|, TFLOPs: (?![^\n]{0,300} Length: )"
    rb"|Throughput: [^\n]{0,40}(?<!samples/sec)\Z"
    rb"|time \(ms\) \| (?:fwd|forward): (?![^\n]{0,300} \| step: \d{1,12}\.\d\d)"
)


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps by their printed number; lines without a number are counted from the first."""
    settings, timer, rlhf, perf = DeepSpeedSettings(), _Timer(), _Rlhf(), _Perf()
    breakdown = _Breakdown()
    results, has_steps = _Results(), False
    for block in watch_end(blocks, log, b"exits successfully", _INCOMPLETE):
        if not has_steps:
            first = _FIGURE.search(block)
            settings.read(block[: first.start()] if first else block)
            has_steps = first is not None
        timer.read(block)
        rlhf.read(block)
        perf.read(block)
        breakdown.read(block)
        results.read(block)
    perf.keep_settings(settings)
    settings.keep(log)
    perf.scale_to_all_devices(log)
    results.keep(log)
    timer.keep_peaks(log)
    series = next((s for s in (rlhf, perf, breakdown, timer) if len(s.log)), timer)
    log.take_steps(series.log)
    if series is breakdown:
        log.remark("the step times are forward, backward and update, without waiting for data")
    if len(log):
        log.facts["log_interval"] = 1
    average = rlhf.average if series is rlhf else timer.average
    if average is not None:
        log.figures["running_samples_per_s"] = average
        if not len(log):
            log.figures.setdefault("samples_per_s", average)
            log.remark("the log prints only a running average of the throughput, no single steps")
    if series is rlhf and len(timer.log):
        log.remark(
            "DeepSpeed's timer lines are ignored: in reinforcement learning they cover only the "
            "actor's update"
        )


class _Timer:
    """DeepSpeed's throughput timer; each line gives the rate of one step and a running average."""

    def __init__(self) -> None:
        self.log = LogContent()
        self.average: float | None = None
        self._skipped: tuple[int, int] = (0, 0)
        self._last, self._offset = 0, 0
        self._has_global_steps = False

    def read(self, block: bytes) -> None:
        if b"skipped=" in block:
            counts = [(int(skipped), int(step)) for step, skipped in _SKIPPED.findall(block)]
            self._skipped = max([self._skipped, *counts])
        if b"global_step=" in block and (matches := _TIMER.findall(block)):
            if not self._has_global_steps:
                # Otherwise the block in which lines of the old form are would decide if they count.
                self.log, self.average, self._has_global_steps = LogContent(), None, True
            self._add(matches, cumulative=True)
        elif (
            not self._has_global_steps
            and any(mark in block for mark in _OLD_MARKS)
            and (old := _OLD_TIMER.findall(block))
        ):
            self._add(old, cumulative=False)

    def keep_peaks(self, log: LogContent) -> None:
        """Store peak memory; remark on fp16 overflow steps, which the running average counts."""
        for kind, value in self.log.memory_bytes.items():
            log.peak(kind, value)
        skipped, step = self._skipped
        if skipped:
            were = verb_form(skipped, "were")
            of = "the only step" if step == 1 else f"{skipped:,} of the first {step:,} steps"
            log.remark(f"{of} {were} skipped (fp16 overflow)")

    def _add(self, matches: list[tuple[bytes, ...]], cumulative: bool) -> None:
        index, average, current, _, peak = zip(*matches, strict=True)
        averages = numbers(average)
        averages = averages[np.isfinite(averages)]
        if len(averages):
            self.average = float(averages[-1])
        peaks = numbers(peak) * GIB
        if np.isfinite(peaks).any():
            self.log.peak("allocated", float(np.max(peaks, where=np.isfinite(peaks), initial=0)))
        if any(current):
            steps = whole_numbers(index)
            self.log.add_steps(
                steps if cumulative else self._continuous_steps(steps),
                samples_per_s=numbers(current),
                allocated_bytes=peaks,
            )

    def _continuous_steps(self, steps: IntColumn) -> IntColumn:
        """Return step numbers across epochs: old timers restart in each epoch."""
        before = np.append(self._last, steps[:-1])
        offsets = self._offset + np.cumsum(np.where(steps < before, before, 0))
        self._last, self._offset = int(steps[-1]), int(offsets[-1])
        return steps + offsets


class _TimedLines:
    """Lines that time one step each without a number; the loss line comes first."""

    def __init__(self, first: int) -> None:
        self.log = LogContent()
        self._next = first
        self._loss = b""

    def records(self, matches: list[tuple[bytes, ...]]) -> list[tuple[bytes, ...]]:
        """Return timed records, each with the loss printed since the previous one."""
        records: list[tuple[bytes, ...]] = []
        loss = self._loss
        for fields in matches:
            if fields[0]:
                loss = fields[0]
            else:
                records.append((loss, *fields[1:]))
                loss = b""
        self._loss = loss
        return records

    def indices(self, count: int) -> IntColumn:
        """Return the next `count` step numbers."""
        self._next += count
        return np.arange(self._next - count, self._next, dtype=np.int64)


class _Rlhf(_TimedLines):
    """Hybrid engine's line, from 0: a whole step, from one generation to the next."""

    def __init__(self) -> None:
        super().__init__(first=0)
        self.average: float | None = None

    def read(self, block: bytes) -> None:
        matches = (
            _RLHF.findall(block) if b"|E2E latency=" in block or b"|act_loss: " in block else []
        )
        records = self.records(matches)
        if not records:
            return
        loss, latency, current, average = zip(*records, strict=True)
        averages = numbers(average)
        if np.isfinite(averages).any():
            self.average = float(averages[np.isfinite(averages)][-1])
        self.log.resolution_s = decimal_step(latency[0])
        self.log.add_steps(
            self.indices(len(records)),
            step_time_s=numbers(latency),
            samples_per_s=numbers(current),
            loss=numbers(loss),
        )


class _Perf(_TimedLines):
    """Performance line of upstream, numbered from 1.

    In supervised steps its batch is that of one device. Samples/s are those of one device, and
    TFLOPs are divided by the number of devices once too often. In reinforcement learning both
    cover the batch of all devices.
    """

    def __init__(self) -> None:
        super().__init__(first=1)
        self._first_line: tuple[bytes, bytes, bytes] | None = None

    def read(self, block: bytes) -> None:
        matches = _PERF.findall(block) if b", TFLOPs: " in block or b", loss = " in block else []
        records = self.records(matches)
        if not records:
            return
        loss, latency, tflops, samples, batch, kind, length = zip(*records, strict=True)
        self._first_line = self._first_line or (kind[0], batch[0], length[0])
        times, self.log.resolution_s = numbers(latency), decimal_step(latency[0])
        if kind[0] == b"Sequence":
            times, self.log.resolution_s = _finest(times, latency[0], numbers(batch), samples)
        self.log.add_steps(
            self.indices(len(records)),
            step_time_s=times,
            flops_per_s_per_device=numbers(tflops) * TERA,
            samples_per_s=numbers(samples),
            loss=numbers(loss),
        )

    def keep_settings(self, settings: DeepSpeedSettings) -> None:
        """Store sequence length and, in supervised steps, the micro-batch.

        Other steps do not print the batch of one device.
        """
        if self._first_line is None:
            return
        kind, batch, length = self._first_line
        if length:
            settings.facts.setdefault("seq_len", int(length))
        if kind == b"Sequence":
            settings.facts.setdefault("micro_batch", int(batch))

    def scale_to_all_devices(self, log: LogContent) -> None:
        """Convert the rates of supervised steps; without the number of devices, leave them out."""
        if self._first_line is None or self._first_line[0] != b"Sequence":
            return
        devices = float(log.facts.get("num_devices", np.nan))
        for name in ("samples_per_s", "flops_per_s_per_device"):
            self.log.set_column(name, [self.log.column(name) * devices])
        if np.isnan(devices):
            log.remark("the printed rates are those of one device and are left out")


def _finest(
    times: FloatColumn, text: bytes, batch: FloatColumn, rates: Sequence[bytes]
) -> tuple[FloatColumn, float]:
    """Return step times from batch / rate where that is printed more finely, and the resolution.

    Both have two decimals, so a rate above 1 sample/s resolves a step below 1 s better.
    """
    resolution, rate = decimal_step(text), numbers(rates)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        fine = batch / rate
        agrees = np.abs(fine - times) <= resolution
    better = agrees & (rate > times)
    if not better.all():
        return np.where(better, fine, times), resolution
    return fine, float(np.median(fine * decimal_step(rates[0]) / rate))


class _Breakdown:
    """DeepSpeed's breakdown of one step, numbered from 1."""

    def __init__(self) -> None:
        self.log = LogContent()

    def read(self, block: bytes) -> None:
        matches = _BREAKDOWN.findall(block) if b"time (ms) | f" in block else []
        if not matches:
            return
        parts = zip(*matches, strict=True)
        times = sum((numbers(part) for part in parts), np.zeros(len(matches)))
        first = len(self.log) + 1
        self.log.resolution_s = MILLISECOND * decimal_step(matches[0][0])
        self.log.add_steps(
            np.arange(first, first + len(matches), dtype=np.int64), step_time_s=times * MILLISECOND
        )


class _Results:
    """Two result lines at the end of Lambda's benchmark."""

    def __init__(self) -> None:
        self._rates: list[bytes] = []
        self._times: list[tuple[bytes, bytes]] = []

    def read(self, block: bytes) -> None:
        if b" samples/sec" in block and len(self._rates) < MAX_RESULTS:
            self._rates += _THROUGHPUT.findall(block)
        if b"Execution time: " in block and len(self._times) < MAX_RESULTS:
            self._times += _TIME.findall(block)

    def keep(self, log: LogContent) -> None:
        """Store the first value of each line, as Lambda's own evaluation does."""
        rates = numbers(self._rates[:1])
        if len(rates) and 0 < rates[0] < np.inf:
            log.figures["samples_per_s"] = float(rates[0])
        if self._times:
            seconds, steps = self._times[0]
            log.figures["run_time_s"] = float(numbers([seconds])[0])
            log.figures["timed_steps"] = int(steps)
        others = len(set(self._rates)) - 1
        if others > 0:
            log.remark(
                f"{len(self._rates)} throughput lines have {others + 1} different values; the "
                "first one is used"
            )


LOG_FORMAT = LogFormat(
    title="DeepSpeed-Chat",
    marks=(b" samples/sec", b"SamplesPerSec=", b"Samples/sec: ", b"time (ms) | f"),
    step_line=re.compile(
        rb"Throughput: [0-9.]{1,24} samples/sec|SamplesPerSec=[0-9]|, Samples/sec: [0-9.]"
        rb"|time \(ms\) \| (?:fwd|forward): [0-9.]{1,24} \| b"
    ),
    read=read,
    example="`Throughput: 987.654 samples/sec`, `CurrSamplesPerSec=`",
    numbering="`global_step`",
    end_marker="exits successfully",
    precedence=8,
    convention="megatron-deepspeed+recompute",
    whole_run=True,
)
