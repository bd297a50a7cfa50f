"""Layouts as points of a space in which neighbours are alike: what a residual model looks at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.layout import Layout
from paceline.estimate.model.case import Floats

SIZES = ("tp", "pp", "cp", "vp", "ep", "micro_batch")
"""Axes that count by their doublings."""
NAMES = (*SIZES, "zero >= 1", "zero >= 2", "zero 3", "full", "selective", "gpipe", "zero-bubble")


def features(layouts: Sequence[Layout]) -> Floats:
    """(layouts, NAMES): doublings of the sizes, and 1 or 0 for what is there or is not.

    Recomputation by a budget counts as the part of a full one that the budget does not keep.
    """
    rows = [[*_doublings(layout), *_present(layout)] for layout in layouts]
    return np.array(rows, dtype=float).reshape(len(layouts), len(NAMES))


def _doublings(layout: Layout) -> list[float]:
    return [float(np.log2(getattr(layout, name))) for name in SIZES]


def _present(layout: Layout) -> list[float]:
    return [
        *(layout.zero_stage >= stage for stage in (1, 2, 3)),
        _recomputed(layout),
        layout.recompute == "selective",
        *(layout.effective_schedule == kind for kind in ("gpipe", "zero-bubble")),
    ]


def _recomputed(layout: Layout) -> float:
    kept = {"full": 0.0, "budget": layout.recompute_budget or 0.0}
    return 1 - kept.get(layout.recompute, 1.0)
