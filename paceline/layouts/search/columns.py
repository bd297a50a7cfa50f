"""Layouts as the arrays that the formulas take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.layout import Layout
from paceline.estimate.model.case import Floats

AXES = ("tp", "pp", "cp", "vp", "ep", "micro_batch", "zero_stage", "sequence_parallel")


def columns(layouts: Sequence[Layout]) -> dict[str, Floats]:
    """The fields of a case that a layout decides, one value a layout."""
    rows = {name: [float(getattr(layout, name)) for layout in layouts] for name in AXES}
    for kind in ("full", "selective"):
        rows[f"{kind}_recompute"] = [float(layout.recompute == kind) for layout in layouts]
    return {name: np.array(values) for name, values in rows.items()}
