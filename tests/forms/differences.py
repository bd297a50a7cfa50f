"""Where two JSON values differ, apart from the last digits of floats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from math import isclose
from typing import Any

TOLERANCE = 1e-9
"""Relative, of floats: what another order of a sum, or another processor, may change."""
UNROUNDED = re.compile(r"-?\d+\.\d{9,}(?:e[-+]?\d+)?|-?\d\.\d+e[-+]?\d+")
"""Floats in text that nobody rounded, as in CSV."""


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
    pairs = list(zip(UNROUNDED.findall(old), UNROUNDED.findall(new), strict=False))
    return UNROUNDED.sub("#", old) == UNROUNDED.sub("#", new) and all(
        _same(float(before), float(after)) for before, after in pairs
    )
