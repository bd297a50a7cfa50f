"""The parallel axes, one module each: what an axis shards, what it refuses, what it exchanges.

Options, tables, labels, checks and traffic loop over `AXES`, so an axis is named nowhere else but
in formulas that need its size. docs/dev/architecture.md lists what adding an axis takes.
"""

from __future__ import annotations

from paceline.core.axes.axis import Axis
from paceline.core.axes.context import CONTEXT
from paceline.core.axes.data import DATA
from paceline.core.axes.expert import EXPERT
from paceline.core.axes.pipeline import PIPELINE, VIRTUAL
from paceline.core.axes.tensor import TENSOR

AXES: tuple[Axis, ...] = (DATA, TENSOR, PIPELINE, CONTEXT, VIRTUAL, EXPERT)
"""In the order of labels."""
AXIS: dict[str, Axis] = {axis.name: axis for axis in AXES}
MESH_AXES: tuple[str, ...] = tuple(
    axis.name
    for axis in sorted(AXES, key=lambda axis: axis.mesh_position or 0)
    if axis.mesh_position is not None
)
"""Dimensions of the trainer's mesh, the outermost first: ranks of the last one are neighbours."""
