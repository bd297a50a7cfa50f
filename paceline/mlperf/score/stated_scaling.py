"""The scaling factor that a submission states in `scaling.json`, beside the one of the test."""

from __future__ import annotations

import json
from math import isclose, isfinite
from pathlib import Path

SCALING_FILE = "scaling.json"
SAME_FACTOR = 1e-6
"""Factors this close, relatively, are one factor with other digits."""


def stated_scaling(folder: Path, factor: float | None, mean_minutes: float | None) -> str | None:
    """What the file in `folder` would make of the score, None where it changes nothing.

    `factor` is that of the convergence test, `mean_minutes` the olympic mean of the run times.
    """
    path = folder / SCALING_FILE
    if factor is None or mean_minutes is None or not path.is_file():
        return None
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))["scaling_factor"]
        stated = float(stated)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return f"{SCALING_FILE} states no scaling_factor that can be read: {factor:.6f} is used"
    if not isfinite(stated) or stated <= 0:
        return f"{SCALING_FILE} states {stated:g}, which is no factor: {factor:.6f} is used"
    if isclose(stated, factor, rel_tol=SAME_FACTOR):
        return None
    return (
        f"{SCALING_FILE} states the factor {stated:.6f}, the convergence test asks for "
        f"{factor:.6f}, which is used: with the file's the score would be "
        f"{mean_minutes * stated:.4f} minutes"
    )
