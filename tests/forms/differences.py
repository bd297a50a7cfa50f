"""Where two JSON values differ, apart from the last digits of floats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from math import isclose
from typing import Any

TOLERANCE = 1e-9
"""Relative, of floats: what another order of a sum, or another processor, may change."""
FLOAT = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")
UNROUNDED_DIGITS = 12
"""Of a float in text that nobody rounded, as in CSV, on one side at least."""


class Absent:
    """Stands for a key or an item that one side lacks."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = Absent()


def differences(old: Any, new: Any, path: str = "$") -> Iterator[str]:
    """A line `path: old -> new` for every value that is another, missing or additional."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from differences(old.get(key, ABSENT), new.get(key, ABSENT), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list):
        for index, (before, after) in enumerate(zip_longest(old, new, fillvalue=ABSENT)):
            yield from differences(before, after, f"{path}[{index}]")
    elif not _same(old, new):
        yield f"{path}: {old!r} -> {new!r}"


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return isclose(old, new, rel_tol=TOLERANCE, abs_tol=0.0)
    if isinstance(old, str) and isinstance(new, str):
        return old == new or _same_text(old, new)
    return type(old) is type(new) and old == new


def _same_text(old: str, new: str) -> bool:
    """Whether two texts are equal but for the last digits of unrounded floats."""
    pairs = zip(FLOAT.findall(old), FLOAT.findall(new), strict=False)
    return FLOAT.sub("#", old) == FLOAT.sub("#", new) and all(
        before == after or (_unrounded(before, after) and _same(float(before), float(after)))
        for before, after in pairs
    )


def _unrounded(*texts: str) -> bool:
    digits = (sum(letter.isdigit() for letter in text.split("e")[0]) for text in texts)
    return max(digits) >= UNROUNDED_DIGITS
