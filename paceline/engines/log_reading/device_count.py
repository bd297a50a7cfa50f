"""The number of devices that two printed rates tell, of all of them and of one."""

from __future__ import annotations

import math

CERTAIN = 0.1
"""How far the ratio of two rates may lie from a whole number that it stands for."""

MOST_DEVICES = 1 << 20


def device_count(of_all: float, of_one: float) -> int | None:
    """The whole number next to of_all / of_one, or None where rounding leaves it open."""
    if not (0 < of_all < 1e100 and 0 < of_one < 1e100):
        return None
    quotient = of_all / of_one
    if not 0.5 < quotient < MOST_DEVICES or not math.isfinite(quotient):
        return None
    count = round(quotient)
    return count if abs(quotient - count) <= CERTAIN else None
