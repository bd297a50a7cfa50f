"""Columns of numbers that grow while a log is read, in as little memory as they can."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.steps import FloatColumn, IntColumn
from paceline.engines.log_reading.step_order import Rows

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
