"""Columns of numbers that grow while a log is read, with rows in training order.

A restart, or another run in the same log, is not an error: its rows follow the earlier ones.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.steps import FloatColumn, IntColumn
from paceline.core.units import pluralize

Rows = npt.NDArray[np.bool_] | npt.NDArray[np.int32]

Change = tuple[Rows, str]
"""Rows to keep, in order, and a remark about the change."""

MAX_RANK_DISTANCE = 3
"""Maximum distance, in step lines, between ranks that print into one log."""

NEARLY_ALL = 0.8
"""Share of lines above which they count as nearly all."""

MAX_ROWS_CHECKED = 100_000


def unswap_neighbours(index: IntColumn, times: FloatColumn) -> Change | None:
    """Return the rows with neighbours in order if two writers have swapped them."""
    at = np.flatnonzero(_swapped_neighbours(index))
    if not len(at):
        return None
    rows = np.arange(len(index), dtype=np.int32)
    rows[at], rows[at + 1] = at + 1, at
    lines = pluralize(len(at), "step line", "were")
    return rows, f"{lines} printed before the previous step's line; the order is restored"


def drop_repeats(index: IntColumn, times: FloatColumn) -> Change | None:
    """Return the rows without those that the next row repeats, as a redrawn progress bar does."""
    before, after = times[:-1], times[1:]
    repeats = (index[:-1] == index[1:]) & ((before == after) | (np.isnan(before) & np.isnan(after)))
    if not repeats.any():
        return None
    rows = np.append(~repeats, True)
    lines = pluralize(int(repeats.sum()), "step line", "repeat")
    return rows, f"{lines} the previous one (ignored)"


def keep_last_per_step(index: IntColumn, times: FloatColumn) -> Change | None:
    """Return the last row of each step if several ranks print every step into one log."""
    if not _from_several_ranks(index[:MAX_ROWS_CHECKED]):
        return None
    rows = final_rows(index)
    num_dropped = len(rows) - int(rows.sum())
    lines = pluralize(num_dropped, "line", "are")
    return rows, f"several ranks print each step: the last line counts, {lines} ignored"


REPAIRS = (unswap_neighbours, drop_repeats, keep_last_per_step)
"""Repairs for writers' mistakes, in the order of their application."""


def restarts(index: IntColumn) -> int:
    """Return how many times the step numbers start again."""
    return int((index[1:] <= index[:-1]).sum())


def grows(index: IntColumn) -> bool:
    return bool((index[1:] > index[:-1]).all())


def _swapped_neighbours(index: IntColumn) -> npt.NDArray[np.bool_]:
    """Return a mask of neighbours whose exchange would put them and the rows around in order."""
    unswap_neighbours = index[:-1] > index[1:]
    unswap_neighbours[1:] &= index[:-2] < index[2:]
    unswap_neighbours[:-1] &= index[:-2] < index[2:]
    return unswap_neighbours


def _from_several_ranks(index: IntColumn) -> bool:
    """Return whether nearly every number occurs several times, and never far apart."""
    distances = np.diff(index)
    ahead, back = distances[distances > 0], -distances[distances <= 0]
    if not len(ahead) or not len(back):
        return False
    if _start_alike(index):
        return False
    near = back <= MAX_RANK_DISTANCE * float(np.median(ahead))
    _, counts = np.unique(index, return_counts=True)
    return float(near.mean()) >= NEARLY_ALL and float((counts > 1).mean()) >= NEARLY_ALL


def _start_alike(index: IntColumn) -> bool:
    """Return whether all increasing sequences start with the same number, as short runs do."""
    begins = np.append(True, index[1:] <= index[:-1])
    return bool((index[begins] == index[0]).all())


def final_rows(index: IntColumn) -> npt.NDArray[np.bool_]:
    """Return a mask of step numbers below all later ones."""
    final = np.ones(len(index), dtype=np.bool_)
    final[:-1] = index[:-1] < np.minimum.accumulate(index[::-1])[::-1][1:]
    return final


FIRST_ROWS = 1 << 12
GROWTH = 4


class GrowingColumn:
    """Growing column of numbers, stored as a single value until the first difference.

    Whole numbers take 32 bits until one needs 64.
    """

    def __init__(self, dtype: type[np.generic]) -> None:
        dtype = np.int32 if dtype is np.int64 else dtype
        self._values = np.empty(0, dtype)
        """Buffer with spare rows; empty while all rows equal the constant."""
        self._constant: npt.NDArray[Any] = np.zeros((), dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, values: FloatColumn | IntColumn) -> None:
        """Append `values`; a value too large for the column becomes infinite."""
        if len(values) == 0:
            return
        length = self._length + len(values)
        if self._values.dtype == np.int32 and not _fit_32_bit(values):
            self._widen()
        with np.errstate(over="ignore"):
            if not self._length:
                self._constant = values[0].astype(self._values.dtype)
            if len(self._values) or not _all_equal(values, self._constant):
                self._grow(length)
                self._values[self._length : length] = values
        self._length = length

    def keep(self, rows: Rows) -> None:
        """Keep only `rows`, in their order."""
        length = int(rows.sum()) if rows.dtype == np.bool_ else len(rows)
        if len(self._values):
            self._values[:length] = self._values[: self._length][rows]
        self._length = length

    def read(self) -> npt.NDArray[Any]:
        """Return the values so far, without a copy; they change if rows are removed later."""
        if len(self._values):
            return self._values[: self._length]
        return np.broadcast_to(self._constant, (self._length,))

    def _widen(self) -> None:
        self._constant = self._constant.astype(np.int64)
        narrow, self._values = self._values, np.empty(0, np.int64)
        if len(narrow):
            self._values = _memory(len(narrow), self._values.dtype)
            self._values[: self._length] = narrow[: self._length]

    def _grow(self, length: int) -> None:
        """Allocate space for `length` rows."""
        if length <= len(self._values):
            return
        capacity = max(FIRST_ROWS, len(self._values))
        while capacity < length:
            capacity *= GROWTH
        larger = _memory(capacity, self._values.dtype)
        larger[: self._length] = self.read()
        self._values = larger


def _memory(length: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return memory allocated directly from the operating system.

    Unused rows take no memory, and freed memory returns to the system. On the heap it may stay with
    the process, because growing columns would leave holes.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, length * dtype.itemsize, flags=private), dtype)


def _fit_32_bit(values: FloatColumn | IntColumn) -> bool:
    limits = np.iinfo(np.int32)
    return bool(limits.min <= values.min() and values.max() <= limits.max)


def _all_equal(values: FloatColumn | IntColumn, constant: npt.NDArray[Any]) -> bool:
    narrow = values.astype(constant.dtype)
    if np.isnan(constant):
        return bool(np.isnan(narrow).all())
    return bool((narrow == constant).all())
