"""Log format of MLPerf Training: rule-defined run time and quality, submitters' own speed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import inf
from typing import Any

from paceline.engines.log_reading.log_content import LogContent, LogFormat, excerpt
from paceline.engines.log_reading.mllog import (
    TOKEN,
    MlRecord,
    number,
    record_of,
    texts,
    whole_number,
)
from paceline.engines.log_reading.mlperf_intervals import KEYS, WITH_EVALUATIONS, TrainingClock
from paceline.engines.log_reading.mlperf_steps import StepLines
from paceline.engines.log_reading.mlperf_system import System
from paceline.engines.log_reading.records import watch_end

FACT_KEYS = {
    "submission_benchmark": "model",
    "submission_org": "submitter",
    "submission_platform": "platform",
    "global_batch_size": "global_batch",
    "gradient_accumulation_steps": "gradient_accumulation",
    "max_sequence_length": "seq_len",
    "lora_rank": "lora_rank",
}
"""Fact names by the key of a result line."""

DATA_PARALLEL = frozenset(
    {"bert", "flux1", "gnn", "resnet", "retinanet", "rgat", "rnnt", "ssd", "stable_diffusion"}
)
"""Benchmarks whose models are not split, so that global / local batch counts devices.

For others, it counts replicas of the model.
"""

SPEED = ("tracked_stats", "train_loss")
MARKERS = ("init_start", "run_start", "run_stop")

_BEGINNINGS = (b'"init_start"', b'"run_start"')
_UNUSED = re.compile(
    rb'\{"namespace": "[^"\\\r\n]{0,64}+", "time_ms": \d{1,16}, "event_type": "POINT_IN_TIME", '
    rb'"key": "(?:cache_clear"|tracked_stats", "value": \{"validation_step_time")'
)
_CANCELLED = re.compile(rb"CANCELLED AT [0-9T:-]{8,30}(?: DUE TO [A-Za-z ]{1,40})?")


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read the first run in the log; steps by their printed number, else by samples / batch."""
    run, system = _Run(log), System()
    for block in watch_end(blocks, log):
        system.read(block)
        run.read(block)
    system.keep(log)
    run.keep()


class _Run:
    """Reader of one run from init_start to run_stop."""

    def __init__(self, log: LogContent) -> None:
        self._log = log
        self._lines = StepLines()
        self._clock = TrainingClock()
        self._markers: dict[str, MlRecord] = {}
        self._last_eval: MlRecord | None = None
        self._rate: float | None = None
        self._unread = 0
        self._over = False
        self._cancelled: str | None = None

    def read(self, block: bytes) -> None:
        """Read the block's result lines, up to the start of another run."""
        if b"CANCELLED AT" in block and (match := _CANCELLED.search(block)):
            self._cancelled = self._cancelled or match[0].decode("ascii").strip()
        if not any(marker in block for marker in _BEGINNINGS):
            block = block if self._over else self._lines.single_steps(block)
        for text in texts(block):
            if self._over:
                return
            if self._lines.read(text) or _UNUSED.match(text):
                continue
            record = record_of(text)
            if record is None:
                self._unread += 1
            else:
                self._take(record)

    def keep(self) -> None:
        """Store all results in the log."""
        self._lines.keep(self._log)
        self._keep_times()
        self._keep_devices()
        if self._unread:
            self._log.remark(f":::MLLOG lines without a complete record, ignored: {self._unread:,}")
        if self._over:
            self._log.remark("the log has more than one run; only the first one is read")

    def _take(self, record: MlRecord) -> None:
        key = record.key
        if key in ("init_start", "run_start") and self._has_run:
            self._over = True
        elif key in MARKERS:
            self._markers.setdefault(key, record)
        elif key in FACT_KEYS:
            self._state(FACT_KEYS[key], record.value)
        elif key == "train_samples":
            self._clock.train_samples = whole_number(record.value) or 0
        elif key == "local_batch_size":
            self._clock.local_batch = whole_number(record.value) or 0
        elif key in SPEED:
            self._lines.take(record)
        elif key in KEYS:
            self._follow(record)
        elif key == "overall_throughput":
            self._rate = number(record.value)

    def _follow(self, record: MlRecord) -> None:
        """Follow a line of a block, an epoch or an evaluation."""
        key, blocks = record.key, self._lines.blocks
        if key == "eval_accuracy":
            self._last_eval = record
        if "run_stop" in self._markers:
            return
        interval = self._clock.take(record, blocks.rate)
        if key == "eval_start" or interval:
            blocks.end((record.count("step"), record.count("samples_count")), interval)

    @property
    def _has_run(self) -> bool:
        """True once the run is past its start, which every rank may report."""
        return self._lines.has_speed or self._last_eval is not None or "run_stop" in self._markers

    def _state(self, fact: str, value: Any) -> None:
        """Store a setting; ignores repetitions by other ranks and placeholders."""
        if isinstance(value, str):
            if value and "PLACEHOLDER" not in value:
                self._log.facts.setdefault(fact, value[:200])
            return
        amount = number(value)
        if amount is not None and 0 < amount < 1e15 and amount.is_integer():
            self._log.facts.setdefault(fact, int(amount))
            if fact == "global_batch":
                self._lines.blocks.global_batch = self._clock.global_batch = int(amount)

    def _keep_times(self) -> None:
        """Store the initialization time, and run time = run_stop - run_start as in the rules."""
        init, start, stop = (self._markers.get(key) for key in MARKERS)
        figures = self._log.figures
        for name, first, last in (("init_time_s", init, start), ("run_time_s", start, stop)):
            if first and last and 0 <= last.time_ms - first.time_ms < inf:
                figures[name] = (last.time_ms - first.time_ms) / 1000
        missing = [key for key in MARKERS[1:] if key not in self._markers]
        if missing:
            why = f": {self._cancelled}" if self._cancelled else ""
            self._log.incomplete_reason = f"the log has no {' and no '.join(missing)} line{why}"
        if stop:
            self._keep_ending(stop)
        if self._rate and 0 < self._rate < inf:
            figures["samples_per_s"] = self._rate
        if self._clock.evaluation_s > 0:
            figures["evaluation_s"] = self._clock.evaluation_s
        if rate := self._clock.rate_with_evaluations:
            self._log.other_rates[WITH_EVALUATIONS] = rate

    def _keep_devices(self) -> None:
        """Store the device count that follows from the batch of one device."""
        facts, local = self._log.facts, self._clock.local_batch
        if facts.get("model") not in DATA_PARALLEL:
            return
        accumulation, batch = facts.get("gradient_accumulation", 1), self._clock.global_batch
        per_device = local * int(accumulation) if isinstance(accumulation, int) else 0
        if per_device and batch and batch % per_device == 0:
            facts.setdefault("num_devices", batch // per_device)

    def _keep_ending(self, stop: MlRecord) -> None:
        log = self._log
        status = excerpt(
            str(stop.metadata.get("status", "not stated"))[:40].encode("utf-8", "replace")
        )
        log.end_line = f"run_stop, status {status}"
        steps = self._lines.blocks.step_of((stop.count("step"), stop.count("samples_count")))
        if steps:
            log.figures["timed_steps"] = steps
        if status != "success":
            log.remark(f"run_stop has status {status}: the quality target was not reached")
        elif self._last_eval and (samples := self._last_eval.count("samples_count")) is not None:
            log.figures["samples_to_target"] = samples


LOG_FORMAT = LogFormat(
    title="MLPerf",
    marks=(TOKEN,),
    step_line=re.compile(rb':::MLLOG \{[^\r\n]{0,200}?"time_ms"'),
    read=read,
    example="`:::MLLOG {...}` with `tracked_stats`",
    numbering="metadata",
    end_marker="run_stop",
    precedence=1,
)
