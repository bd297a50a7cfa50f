"""Columns of numbers that grow while a log is read, and their rows in the order of training.

A restart, or another run in the same log, is nothing to put right: it stays, one after the other.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.steps import FloatColumn, IntColumn
from paceline.core.units import counted

Rows = npt.NDArray[np.bool_] | npt.NDArray[np.int32]

Change = tuple[Rows, str]
"""The rows to keep, in their order, and what is said about it."""

NEAR = 3
"""Ranks that print into one log are no more than this many step lines apart."""

MOSTLY = 0.8
"""Share of the lines from which nearly all of them are said to do something."""

ROWS_LOOKED_AT = 100_000


def swapped(index: IntColumn, times: FloatColumn) -> Change | None:
    """The rows with neighbours in order that two writers have swapped."""
    at = np.flatnonzero(_swapped(index))
    if not len(at):
        return None
    rows = np.arange(len(index), dtype=np.int32)
    rows[at], rows[at + 1] = at + 1, at
    lines = counted(len(at), "step line", "stand")
    return rows, f"{lines} before the line of the step before: swapped"


def repeated(index: IntColumn, times: FloatColumn) -> Change | None:
    """The rows without those that the next one repeats, as a bar does that is drawn again."""
    before, after = times[:-1], times[1:]
    again = (index[:-1] == index[1:]) & ((before == after) | (np.isnan(before) & np.isnan(after)))
    if not again.any():
        return None
    kept = np.append(~again, True)
    lines = counted(int(again.sum()), "step line", "repeat")
    return kept, f"{lines} the one before: left out"


def interleaved(index: IntColumn, times: FloatColumn) -> Change | None:
    """The last row of each step, where several ranks print every one of them into one log."""
    if not _from_several_ranks(index[:ROWS_LOOKED_AT]):
        return None
    kept = _final(index)
    dropped = len(kept) - int(kept.sum())
    lines = counted(dropped, "line", "are")
    return kept, f"several ranks print each step: {lines} followed by a later one"


REPAIRS = (swapped, repeated, interleaved)
"""What writers confuse, in the order in which it is put right."""


def restarts(index: IntColumn) -> int:
    """How many times the step numbers start again."""
    return int((index[1:] <= index[:-1]).sum())


def grows(index: IntColumn) -> bool:
    return bool((index[1:] > index[:-1]).all())


def _swapped(index: IntColumn) -> npt.NDArray[np.bool_]:
    """Where two neighbours would be in order, with those around them, if they changed places."""
    swapped = index[:-1] > index[1:]
    swapped[1:] &= index[:-2] < index[2:]
    swapped[:-1] &= index[:-2] < index[2:]
    return swapped


def _from_several_ranks(index: IntColumn) -> bool:
    """True when nearly every number comes several times, and never from far back."""
    distances = np.diff(index)
    ahead, back = distances[distances > 0], -distances[distances <= 0]
    if not len(ahead) or not len(back):
        return False
    if _begin_alike(index):
        return False
    near = back <= NEAR * float(np.median(ahead))
    _, counts = np.unique(index, return_counts=True)
    return float(near.mean()) >= MOSTLY and float((counts > 1).mean()) >= MOSTLY


def _begin_alike(index: IntColumn) -> bool:
    """True when every stretch of growing numbers begins with the same one, as short runs do."""
    begins = np.append(True, index[1:] <= index[:-1])
    return bool((index[begins] == index[0]).all())


def _final(index: IntColumn) -> npt.NDArray[np.bool_]:
    """Which step numbers are below all that come later."""
    final = np.ones(len(index), dtype=np.bool_)
    final[:-1] = index[:-1] < np.minimum.accumulate(index[::-1])[::-1][1:]
    return final


FIRST_ROWS = 1 << 12
GROWTH = 4


class GrowingColumn:
    """A growing column of numbers; a single value until the first one differs.

    Whole numbers take 32 bit until one of them needs 64.
    """

    def __init__(self, dtype: type[np.generic]) -> None:
        dtype = np.int32 if dtype is np.int64 else dtype
        self._values = np.empty(0, dtype)
        """Room for more rows than there are; empty as long as all are the constant."""
        self._constant: npt.NDArray[Any] = np.zeros((), dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, values: FloatColumn | IntColumn) -> None:
        """Append `values`; one too large for the column is infinite."""
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
        """The values so far, without a copy; they change when rows are taken away later."""
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
        """Make room for `length` rows."""
        if length <= len(self._values):
            return
        room = max(FIRST_ROWS, len(self._values))
        while room < length:
            room *= GROWTH
        larger = _memory(room, self._values.dtype)
        larger[: self._length] = self.read()
        self._values = larger


def _memory(length: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Room straight from the operating system.

    Rows that are not yet used take nothing, and what is given back does not stay with the process,
    as it may in the heap, where growing columns would leave holes between them.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, length * dtype.itemsize, flags=private), dtype)


def _fit_32_bit(values: FloatColumn | IntColumn) -> bool:
    limits = np.iinfo(np.int32)
    return bool(limits.min <= values.min() and values.max() <= limits.max)


def _all_equal(values: FloatColumn | IntColumn, constant: npt.NDArray[Any]) -> bool:
    narrowed = values.astype(constant.dtype)
    if np.isnan(constant):
        return bool(np.isnan(narrowed).all())
    return bool((narrowed == constant).all())
