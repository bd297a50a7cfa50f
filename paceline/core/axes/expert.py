"""Expert parallelism: data-parallel ranks that each hold a part of the experts."""

from __future__ import annotations

from paceline.core.axes.axis import Axis, Rule, refuse
from paceline.core.parallel_run import ParallelRun
from paceline.core.units import pluralize

RULES: tuple[Rule, ...] = (
    refuse(
        "ep",
        native=True,
        why="ep > 1 is not in the native trainer: its ranks hold all experts; use layout.ep=1",
    ),
)


def whole_experts(x: ParallelRun) -> str | None:
    """ep divides the experts and dp x cp."""
    ep, shape, ranks = x.layout.ep, x.shape, x.data_ranks
    experts = shape.num_experts if shape.kind == "decoder" else 1
    if experts % ep == 0 and ranks % ep == 0:
        return None
    if experts == 1:
        return f"ep {ep} spreads experts over ranks, and the model has none: use layout.ep=1"
    return (
        f"{experts} experts on dp x cp = {pluralize(ranks, 'rank')} cannot be split over ep {ep}, "
        "because expert ranks are data ranks that hold equally many experts: use an ep that "
        "divides both"
    )


EXPERT = Axis(
    name="ep",
    long_name="expert parallelism",
    size_name="expert-parallel ranks",
    shards="the experts of every block",
    sweep_help="Expert-parallel sizes.",
    rules=RULES,
    size_rules=(whole_experts,),
)
