"""Layouts and numbers of devices that answer a question: what fits, what meets a deadline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import Estimate, estimate
from paceline.layouts.search.space import SearchSpace
from paceline.layouts.tune.ranking import rank_layouts

NUM_RANKED = 50
"""Number of layouts whose pipelines are simulated to find the fastest."""
MAX_GROWTH = 64
"""Largest factor by which the devices are increased until a model fits."""
MAX_DEVICES = 1 << 20


@dataclass(frozen=True)
class PlannedTraining:
    """A request in a layout that was best for it, and its estimate."""

    request: EstimateRequest
    estimate: Estimate
    changes: str
    """Differences from the layout of the recipe, as for `--layout`."""


def fastest_fitting(request: EstimateRequest, evidence: Evidence) -> PlannedTraining | None:
    """Return the fastest layout that fits on the requested devices; None if there is none.

    One that is borderline is returned only if no layout fits for sure.
    """
    try:
        ranking = rank_layouts(request, evidence, SearchSpace(), NUM_RANKED).layouts
    except UserError:
        return None
    if not ranking[0].fits:
        return None
    layout = ranking[0].layout
    content = layout.model_dump_json(exclude_none=True)
    best = replace(request, overrides=(*request.overrides, f"layout={content}"))
    changes = layout_changes(request.resolved_recipe.layout, layout)
    return PlannedTraining(best, estimate(best, evidence), changes)


def fewest_devices(request: EstimateRequest, evidence: Evidence) -> PlannedTraining | None:
    """Return the training on the fewest devices, by doubling them, on which it fits."""
    for power in range(1, MAX_GROWTH.bit_length()):
        larger = replace(request, devices=request.devices * 2**power)
        if training := fastest_fitting(larger, evidence):
            return training
    return None


def devices_for_days(
    request: EstimateRequest, evidence: Evidence, days: float
) -> tuple[PlannedTraining | None, list[PlannedTraining]]:
    """Return the training on the fewest devices that takes at most `days`, and all estimated ones.

    Numbers of devices are a power of two, or three times one, times those of a node.
    """
    sizes = list(_cluster_sizes(request.devices_per_node))
    trainings: dict[int, PlannedTraining | None] = {}

    def takes(row: int) -> float:
        if row not in trainings:
            trainings[row] = fastest_fitting(replace(request, devices=sizes[row]), evidence)
        training = trainings[row]
        cost = training.estimate.training_cost if training else None
        return cost.days if cost else float("inf")

    low, high = -1, len(sizes) - 1
    row = min(range(len(sizes)), key=lambda at: abs(sizes[at] - 256))
    while high - low > 1:
        days_taken = takes(row)
        low, high = (row, high) if days_taken > days else (low, row)
        # Time falls about as the devices grow, which brings the search close in one step.
        target = sizes[row] * days_taken / days if days_taken < float("inf") else 4 * sizes[row]
        near = min(range(len(sizes)), key=lambda at: abs(sizes[at] - target))
        row = min(max(near, low + 1), high - 1) if high - low > 1 else row
    best = trainings.get(high) if takes(high) <= days else None
    return best, [training for row in sorted(trainings) if (training := trainings[row]) is not None]


def layout_changes(before: Layout, after: Layout) -> str:
    """Return the fields of a layout that differ from another one, as for `--layout`."""
    old, new = before.model_dump(), after.model_dump()
    differences = {name: value for name, value in new.items() if value != old[name]}
    return ",".join(f"{name}={str(value).lower()}" for name, value in differences.items())


def _cluster_sizes(per_node: int) -> Iterator[int]:
    nodes = 1
    while nodes * per_node <= MAX_DEVICES:
        yield nodes * per_node
        if nodes > 1:
            yield nodes // 2 * 3 * per_node
        nodes *= 2
