"""Megatron-family iteration records as steps: columns, times in seconds, skipped steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.steps import FloatColumn, IntColumn
from paceline.core.units import TERA
from paceline.engines.log_reading.iteration_records import RECORD, Fields, Rows, whole_records
from paceline.engines.log_reading.log_content import (
    LogContent,
    decimal_step,
    numbers,
    whole_numbers,
)
from paceline.engines.log_reading.megatron_settings import MegatronSettings

__all__ = ["Batch", "IterationLog"]

COLUMNS = (
    (rb"elapsed time per iteration \(ms\)", "step_time_s", 1000.0),
    (rb"elapsed time per iteration \(s\)", "step_time_s", 1.0),
    (rb"(?:(?:lm|total|language)[ _-])?loss", "loss", 1.0),
    (rb"grad(?:ient)?[ _]norm", "grad_norm", 1.0),
    (rb"global batch size", "global_batch", 1.0),
    (rb"(?:actual|curriculum) seqlen", "seq_len", 1.0),
    (
        rb"[a-z ]{0,40}\(TFLOPs?/s(?:ec)?/GPU\)|TFLOPs|approx flops per GPU",
        "flops_per_s_per_device",
        1 / TERA,
    ),
    (
        rb"tokens/s(?:ec)?/GPU(?: inst.{0,20})?|TGS"
        rb"|[a-z ]{0,40}\((?:tgs|tok(?:ens)?/s(?:ec)?/GPU)\)",
        "tokens_per_s_per_device",
        1.0,
    ),
    (rb"samples per second|samples/sec|iteration time", "samples_per_s", 1.0),
)
"""Name of a field, column of Step, and divisor of the printed number.

Division by 1000 turns 13035.3 ms into exactly 13.0353; multiplication by 0.001 would not.
"""

SKIPPED, NAN = b"number of skipped iterations", b"number of nan iterations"
SAMPLES, TOKENS = b"consumed samples", b"consumed tokens"
POWER = b"power per GPU (W/GPU)"

OTHERS = (SKIPPED, NAN, SAMPLES, TOKENS, POWER)
"""Fields that do not become columns."""

_COLUMNS = tuple((re.compile(name, re.I), column, divisor) for name, column, divisor in COLUMNS)
_WANTED = re.compile(b"|".join([*(name for name, _, _ in COLUMNS), *map(re.escape, OTHERS)]), re.I)


_RATE_BEFORE = re.compile(
    rb"samples/sec: {0,8}+([0-9.eE+-]{1,24}+) {0,8}+\| {0,8}+iteration {1,24}+(\d{1,18})/"
)
"""Rate at the start of a record, as GPT-NeoX prints it."""
ROUNDING = 1e-3
"""Largest relative rounding of a printed rate and step time whose product is a batch."""

_ATTEMPT = re.compile(rb"(?=using world size: \d|-{8,60} arguments -{8,60})")
"""Text at the start of a program, before its settings."""

MAX_ITERATIONS = 1e9
NO_STEPS: IntColumn = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Batch:
    """Iteration records of one piece of a log."""

    text: bytes
    """Text of the piece, including text between the records."""
    index: IntColumn
    columns: dict[str, FloatColumn]
    """Columns by the names of Step; all as long as `index`."""


class IterationLog:
    """Reader of iteration records in batches; other information goes to the log's facts."""

    def __init__(self, log: LogContent) -> None:
        self._log = log
        self._fields = Fields(_WANTED)
        self._settings = MegatronSettings(log)
        self._targets: dict[bytes, tuple[str, float] | None] = {}
        self._time_fields: set[bytes] = set()
        self._num_skipped = self._num_nan = self._num_untimed = 0
        self._powers_w = [0.0, 0]
        self._shortest, self._longest = math.inf, 0.0
        self._attempt_start = 0

    def batches(self, blocks: Iterable[bytes]) -> Iterator[Batch]:
        """Yield the records of `blocks` piece by piece; without records, the index is empty."""
        rows, text = None, b""
        for text in _parts(whole_records(blocks)):
            self._begin_attempt(text)
            self._settings.read(text)
            rows = self._fields.rows(text)
            yield self._batch(text, rows) if rows else Batch(text, NO_STEPS, {})
        if rows and not rows.ends_whole and not text.endswith((b"\n", b"\r")):
            self._log.incomplete_reason = f"the log ends within iteration {int(rows.numbers[-1]):,}"
        self._settings.finish()
        self._finish()

    def _begin_attempt(self, text: bytes) -> None:
        """Separate the settings of this attempt from those of earlier steps, if it has any."""
        if len(self._log) > self._attempt_start and _ATTEMPT.match(text):
            self._settings.finish()
            self._keep_length()
            self._log.begin_attempt()
            self._settings = MegatronSettings(self._log)
            self._shortest, self._longest = math.inf, 0.0
            self._attempt_start = len(self._log)

    def _batch(self, text: bytes, rows: Rows) -> Batch:
        self._note_totals(text, rows)
        index, columns = whole_numbers(rows.numbers), self._columns(rows)
        if b"samples/sec: " in text and "samples_per_s" not in columns:
            columns |= _rates_before(text, rows, columns.get("step_time_s"))
        self._count_power(rows)
        self._mark_overflows(rows, columns)
        unknown = np.full(len(index), np.nan)
        has_time = ~np.isnan(columns.get("step_time_s", unknown))
        has_time |= ~np.isnan(columns.get("samples_per_s", unknown))
        if not has_time.all():
            self._num_untimed += len(index) - int(has_time.sum())
            index, columns = index[has_time], {name: c[has_time] for name, c in columns.items()}
        return Batch(text, index, columns)

    def _columns(self, rows: Rows) -> dict[str, FloatColumn]:
        """Return the columns of Step; if fields mean the same, the first by name wins."""
        columns: dict[str, FloatColumn] = {}
        for name, texts in sorted(rows.columns.items()):
            target = self._target(name)
            if target is None:
                continue
            column, divisor = target
            values = numbers(texts) / divisor
            if column in columns:
                values = np.where(np.isnan(columns[column]), values, columns[column])
            columns[column] = values
            if column == "step_time_s" and name not in self._time_fields:
                self._time_fields.add(name)
                step_s = decimal_step(next(filter(None, texts))) / divisor
                self._log.resolution_s = max(self._log.resolution_s, step_s)
        return columns

    def _target(self, name: bytes) -> tuple[str, float] | None:
        """Return a field's column and the divisor of its numbers."""
        if name not in self._targets:
            self._targets[name] = next(
                (
                    (column, divisor)
                    for pattern, column, divisor in _COLUMNS
                    if pattern.fullmatch(name)
                ),
                None,
            )
        return self._targets[name]

    def _mark_overflows(self, rows: Rows, columns: dict[str, FloatColumn]) -> None:
        """Set the loss to infinity if all of a line's losses are NaN; drop infinite gradient norms.

        An overflow of the loss scale skips the step and is not a failure; the gradient norm of such
        a step is infinite.
        """
        skipped, nan = (
            _counts(rows.columns[n]) if n in rows.columns else None for n in (SKIPPED, NAN)
        )
        if skipped is not None and skipped.any():
            self._num_skipped += int(skipped.sum())
            norm = columns.get("grad_norm")
            if norm is not None:
                norm[np.isinf(norm) & (skipped > 0)] = np.nan
        if nan is not None and nan.any():
            self._num_nan += int(nan.sum())
            loss = columns.setdefault("loss", np.full(len(nan), np.nan))
            loss[np.isnan(loss) & (nan > 0)] = np.inf

    def _count_power(self, rows: Rows) -> None:
        if POWER in rows.columns:
            watts = numbers(rows.columns[POWER])
            watts = watts[np.isfinite(watts)]
            self._powers_w[0] += float(watts.sum())
            self._powers_w[1] += len(watts)

    def _note_totals(self, text: bytes, rows: Rows) -> None:
        """Store the total number of steps, and the tokens per sample from the totals so far."""
        record, columns = RECORD.search(text), rows.columns
        if record:
            self._log.facts.setdefault("total_steps", int(record[2]))
        if SAMPLES not in columns or TOKENS not in columns:
            return
        samples, tokens = numbers(columns[SAMPLES]), numbers(columns[TOKENS])
        sound = (samples > 0) & (tokens > 0) & np.isfinite(samples) & np.isfinite(tokens)
        if sound.any():
            lengths = tokens[sound] / samples[sound]
            self._shortest = min(self._shortest, float(lengths.min()))
            self._longest = max(self._longest, float(lengths.max()))

    def _finish(self) -> None:
        log, (watts, lines) = self._log, self._powers_w
        if lines:
            log.figures["power_w_per_device"] = watts / lines
        self._keep_length()
        for count, sentence in (
            (self._num_skipped, "skipped steps (overflow), included in the printed times"),
            (self._num_nan, "skipped steps with a NaN loss"),
            (self._num_untimed, "iteration lines without a step time, ignored"),
        ):
            if count:
                log.remark(f"{sentence}: {count:,}")

    def _keep_length(self) -> None:
        # If the length grows with a curriculum, the mean of the totals grows too.
        if self._shortest == self._longest and self._longest.is_integer():
            self._log.facts.setdefault("seq_len", int(self._longest))


def _parts(texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the texts, split before the output of a program's start."""
    for text in texts:
        begins = b"using world size: " in text or b" arguments -" in text
        yield from filter(None, _ATTEMPT.split(text) if begins else [text])


def _rates_before(
    text: bytes, rows: Rows, step_time_s: FloatColumn | None
) -> dict[str, FloatColumn]:
    """Return the rates in front of the records, and the batches that follow from the step times."""
    rates = _RATE_BEFORE.findall(text)
    if tuple(number for _, number in rates) != rows.numbers:
        return {}
    samples_per_s = numbers([rate for rate, _ in rates])
    columns = {"samples_per_s": samples_per_s}
    if step_time_s is not None:
        batch = samples_per_s * step_time_s
        whole = np.abs(batch - np.round(batch)) <= np.minimum(ROUNDING * batch, 0.25)
        if whole.all():
            columns["global_batch"] = np.round(batch)
    return columns


def _counts(texts: Sequence[bytes]) -> FloatColumn:
    """Return numbers of iterations; 0 if missing or implausible."""
    values = numbers(texts)
    return np.where((values > 0) & (values < MAX_ITERATIONS), values, 0.0)
