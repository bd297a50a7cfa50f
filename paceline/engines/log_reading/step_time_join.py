"""Joins what rank 0 and the last rank print of the same steps, though lines are swapped or lost.

Both print in the order of the steps, so the k-th line belongs to the k-th record as long as their
times agree. Where they do not, a line is missing on one side: the smallest number of lines is left
out after which the times agree again. What is joined wrongly all the same has an equal step time,
and so an equal TFLOP/s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.steps import FloatColumn, IntColumn
from paceline.core.units import TERA
from paceline.engines.log_reading.log_content import LogContent, decimal_step, numbers

__all__ = ["STEP_TIME", "StepTimeJoin"]

STEP_TIME = re.compile(
    rb"Step Time : ([0-9.]{1,24}+)s GPU utilization: "
    rb"([0-9.]{1,24}+|nan|inf) ?(?:MODEL_)?TFLOP/s/GPU"
)

CLOCK_S, CLOCK_SHARE = 0.002, 0.001
"""How far apart two ranks measure the same step, beyond the printed digits: seconds, share."""

LOOK_AHEAD = 32
"""Lines on each side among which the next agreement is looked for."""

AGREEING = 5
"""Steps in a row that must agree for the place to be believed."""

MOST_WAITING = 1 << 16
"""Lines of one side that wait for the other."""

MOST_GAPS = 2_000
FLOPS = "flops_per_s_per_device"


@dataclass(frozen=True)
class _Lines:
    """Step Time lines that wait for their records."""

    times_s: FloatColumn
    flops_per_s: FloatColumn


@dataclass(frozen=True)
class _Records:
    """Iteration records that wait for their lines."""

    index: IntColumn
    columns: dict[str, FloatColumn]

    @property
    def times_s(self) -> FloatColumn:
        return self.columns.get("step_time_s", np.zeros(0))


class StepTimeJoin:
    """Adds to a log the iteration records with the FLOP/s of their Step Time lines."""

    def __init__(self, log: LogContent) -> None:
        self._log = log
        self._step_s = 0.0
        self._lines = _Lines(np.zeros(0), np.zeros(0))
        self._records = _Records(np.zeros(0, np.int64), {})
        self._num_gaps = self._num_lines_alone = self._num_records_alone = self._num_numbered = 0
        self._has_lines = self._has_records = self._has_zeros = False

    def add(
        self, index: IntColumn, columns: dict[str, FloatColumn], lines: list[tuple[bytes, bytes]]
    ) -> None:
        """Take the next records and lines; those that are matched are added to the log's steps."""
        if lines:
            self._take_lines(lines)
        if len(index):
            self._has_records = True
            self._records = _Records(
                np.append(self._records.index, index), _joined(self._records, index, columns)
            )
        self._match(is_last=False)
        self._pass_records(len(self._records.index) - MOST_WAITING)
        self._leave_lines(len(self._lines.times_s) - MOST_WAITING)

    def finish(self) -> None:
        """Add what is left, and say what found no counterpart."""
        self._match(is_last=True)
        self._pass_records(len(self._records.index))
        self._leave_lines(len(self._lines.times_s))
        self._add_remarks()

    def _take_lines(self, lines: list[tuple[bytes, bytes]]) -> None:
        times, flops = zip(*lines, strict=True)
        self._has_lines = True
        self._step_s = self._step_s or decimal_step(times[0])
        values = numbers(flops)
        # Version 25.11 prints 0.0 for hybrid models, whose FLOPs it cannot count.
        self._has_zeros = self._has_zeros or bool((values == 0).any())
        values[values == 0] = np.nan
        self._lines = _Lines(
            np.append(self._lines.times_s, numbers(times)),
            np.append(self._lines.flops_per_s, values * TERA),
        )

    def _match(self, is_last: bool) -> None:
        """Join in order as far as the times agree, and over the gaps."""
        while True:
            n = min(len(self._lines.times_s), len(self._records.index))
            agree = self._agree(self._lines.times_s[:n], self._records.times_s[:n])
            agreeing = n if agree.all() else int(np.argmin(agree))
            self._pass_records(agreeing, self._lines.flops_per_s[:agreeing])
            self._drop_lines(agreeing)
            if agreeing == n or (n - agreeing < LOOK_AHEAD and not is_last):
                return
            lines, records = self._gap() if self._num_gaps < MOST_GAPS else (n, n)
            self._num_gaps += 1
            self._leave_lines(lines)
            self._pass_records(records)

    def _agree(self, lines_s: FloatColumn, records_s: FloatColumn) -> npt.NDArray[np.bool_]:
        """Which times are those of one step, as two clocks measure it."""
        sound = np.where(np.isfinite(records_s), records_s, np.nan)
        tolerance = self._step_s / 2 + CLOCK_S + CLOCK_SHARE * sound
        return np.abs(lines_s - sound) <= tolerance

    def _gap(self) -> tuple[int, int]:
        """How many lines and records to leave out, the fewest, until five steps in a row agree.

        Behind the last line or record anything agrees.
        """
        lines, records = self._lines.times_s[:LOOK_AHEAD], self._records.times_s[:LOOK_AHEAD]
        shape = len(lines), len(records)
        padded = np.ones((shape[0] + AGREEING, shape[1] + AGREEING), dtype=np.bool_)
        padded[: shape[0], : shape[1]] = self._agree(lines[:, None], records[None, :])
        runs = padded[: shape[0], : shape[1]].copy()
        for k in range(1, AGREEING):
            runs &= padded[k : k + shape[0], k : k + shape[1]]
        places = np.argwhere(runs)
        if not len(places):
            return 1, 1
        left_lines, left_records = places[np.argmin(places.sum(axis=1))]
        return int(left_lines), int(left_records)

    def _pass_records(self, n: int, flops_per_s: FloatColumn | None = None) -> None:
        """Add the first `n` records to the log's steps, with the FLOP/s of their lines if known."""
        if n <= 0:
            return
        index, columns = self._records.index, self._records.columns
        first = {name: column[:n] for name, column in columns.items()}
        if flops_per_s is None:
            self._num_records_alone += n
        else:
            printed = first.get(FLOPS, flops_per_s)
            first[FLOPS] = np.where(np.isnan(printed), flops_per_s, printed)
        self._log.add_steps(index[:n], **first)
        self._records = _Records(index[n:], {name: column[n:] for name, column in columns.items()})

    def _leave_lines(self, n: int) -> None:
        """Pass over the first `n` lines; in a log without any records they are the steps."""
        if n <= 0:
            return
        if self._has_records:
            self._num_lines_alone += n
        else:
            self._log.add_steps(
                np.arange(self._num_numbered + 1, self._num_numbered + n + 1),
                step_time_s=self._lines.times_s[:n],
                flops_per_s_per_device=self._lines.flops_per_s[:n],
            )
            self._num_numbered += n
        self._drop_lines(n)

    def _drop_lines(self, n: int) -> None:
        self._lines = _Lines(self._lines.times_s[n:], self._lines.flops_per_s[n:])

    def _add_remarks(self) -> None:
        log = self._log
        if self._num_numbered:
            log.resolution_s = log.resolution_s or self._step_s
            log.remark("it has Step Time lines only, without numbers: steps are counted from 1")
        if self._has_zeros:
            log.remark("it prints a GPU utilization of 0.0, which is not taken for a measurement")
        if self._has_records and self._num_lines_alone:
            log.remark(
                f"Step Time lines without iteration line, left out: {self._num_lines_alone:,}"
            )
        if self._has_lines and self._has_records and self._num_records_alone:
            log.remark(f"iteration lines without Step Time line: {self._num_records_alone:,}")


def _joined(
    records: _Records, index: IntColumn, columns: dict[str, FloatColumn]
) -> dict[str, FloatColumn]:
    """The columns of `records` with `columns` behind them; NaN where one of them lacks a column."""
    before, after = (np.full(len(rows), np.nan) for rows in (records.index, index))
    return {
        name: np.append(records.columns.get(name, before), columns.get(name, after))
        for name in records.columns.keys() | columns.keys()
    }
