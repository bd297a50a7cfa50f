"""Step lines in the order of training, though writers overtake each other and repeat themselves.

A restart, or another run in the same log, is nothing to put right: it stays, one after the other.
"""

from __future__ import annotations

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
