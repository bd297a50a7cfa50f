"""Parallel axes, one module each: what an axis shards, which combinations it refuses, its traffic.

Options, tables, labels, checks and traffic loop over `AXES`. Code outside this package names an
axis only in formulas that need its size. docs/dev/architecture.md lists the steps to add an axis.
"""

from __future__ import annotations

from paceline.core.axes.axis import Axis
from paceline.core.axes.context import CONTEXT
from paceline.core.axes.data import DATA
from paceline.core.axes.expert import EXPERT
from paceline.core.axes.pipeline import PIPELINE, VIRTUAL
from paceline.core.axes.tensor import TENSOR

AXES: tuple[Axis, ...] = (DATA, TENSOR, PIPELINE, CONTEXT, VIRTUAL, EXPERT)
"""All axes, in the order in which labels show them."""
AXIS: dict[str, Axis] = {axis.name: axis for axis in AXES}
MESH_AXES: tuple[str, ...] = tuple(
    axis.name
    for axis in sorted(AXES, key=lambda axis: axis.mesh_position or 0)
    if axis.mesh_position is not None
)
"""Dimensions of the trainer's device mesh, outermost first. Ranks of the last one are adjacent."""
