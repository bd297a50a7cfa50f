"""Ranking every layout of a recipe on a cluster by its estimate, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from paceline.core.errors import UserError
from paceline.core.hardware import Device
from paceline.core.layout import Layout
from paceline.core.layout_sizes import layout_problems
from paceline.core.value import Value
from paceline.estimate.estimate import Question, case_of, machine_of, spec_of_any_layout
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.interval import bounds, log_sd
from paceline.estimate.memory.device_memory import MemoryEstimate, memory, p_oom
from paceline.estimate.memory.framework import frameworks_of
from paceline.estimate.model.case import Case, Cases, Floats, varied
from paceline.estimate.model.coefficients import named
from paceline.estimate.model.step import step_time
from paceline.layouts.search.columns import columns
from paceline.layouts.search.space import Space, feasible

LIKELY = 0.5
"""A layout that runs out of memory with a higher probability is pruned."""


class RankedLayout(Value):
    """One layout with its estimate; 80 % lie between low and high."""

    layout: Layout
    label: str
    step_time_s: float
    low_s: float
    high_s: float
    memory_bytes: float
    """Device memory in use on the fullest rank."""
    p_oom: float
    fits: bool


class Ranking(Value):
    """All layouts, best first."""

    recipe: str
    device: str
    devices: int
    n_layouts: int
    """Layouts that were estimated."""
    n_infeasible: int
    """Combinations that cannot run, because sizes do not divide or a rule forbids them."""
    n_pruned: int
    """Estimated ones that would run out of memory with more than even odds, the bound of pruning."""
    bound: str
    layouts: tuple[RankedLayout, ...]
    recipe_layout: RankedLayout | None
    """The recipe's own layout, for comparison; None where it does not divide the devices."""
    evidence: str


@dataclass(frozen=True)
class _Estimated:
    layouts: Sequence[Layout]
    x: Cases
    seconds: Floats
    memory: MemoryEstimate
    p_oom: Floats


def rank(question: Question, evidence: Evidence, space: Space, top: int) -> Ranking:
    """The `top` fastest layouts that fit; raises UserError when none divides the devices.

    The recipe's own layout is told beside them where it can run on so many devices.
    """
    spec, here = spec_of_any_layout(question), machine_of(question)
    limit = here.device.memory_bytes
    if limit is None:
        raise UserError(here.device.name, "has no memory size in the catalog")
    training, case = spec.training, case_of(spec, here, question.stack, question.compiled)
    layouts, refused = feasible(
        spec.model, spec.world_size, training.global_batch, training.seq_len,
        worth(space.around(spec.layout), case),
    )  # fmt: skip
    if not layouts:
        raise UserError(f"{spec.recipe} on {spec.world_size} devices", "has no layout that divides")
    # The candidates have schedules and shards of their own, not the recipe's.
    plain = replace(case, schedule="1f1b", dp_shard=0.0)
    found = _estimated(plain, layouts, evidence, here.device)
    fits = found.p_oom <= LIKELY
    order = np.lexsort((found.memory.device_used, found.seconds, ~fits))[:top]
    refused_own = layout_problems(
        spec.layout, spec.model, spec.world_size, training.global_batch, training.seq_len
    )
    own = None if refused_own else _estimated(case, [spec.layout], evidence, here.device)
    return Ranking(
        recipe=spec.recipe,
        device=here.device.name,
        devices=spec.world_size,
        n_layouts=len(layouts),
        n_infeasible=refused,
        n_pruned=int((~fits).sum()),
        bound=f"more than {LIKELY:.0%} likely to exceed {limit / 1e9:.0f} GB",
        layouts=tuple(_told(found, order.tolist(), evidence, spec.world_size)),
        recipe_layout=_told(own, [0], evidence, spec.world_size)[0] if own else None,
        evidence=evidence.title,
    )


def worth(space: Space, case: Case) -> Space:
    """The space without selective recomputation where a stack keeps no scores to compute again."""
    if not (case.flash and case.stack == "fused"):
        return space
    return replace(space, recompute=tuple(one for one in space.recompute if one != "selective"))


def _estimated(
    case: Case, layouts: Sequence[Layout], evidence: Evidence, device: Device
) -> _Estimated:
    x = varied(case, columns(layouts))
    frameworks = frameworks_of(case.generation, native=False)
    needed = memory(x, frameworks, device.context_bytes)
    seconds = step_time(x, named(evidence.fit().centre)).total
    limit = device.memory_bytes or inf
    return _Estimated(layouts, x, seconds, needed, p_oom(needed, limit))


def _told(
    found: _Estimated, rows: Sequence[int], evidence: Evidence, devices: int
) -> list[RankedLayout]:
    """Some of the layouts with their intervals."""
    chosen = np.array(rows, dtype=np.int64)
    sd = log_sd(found.x.pick(chosen), evidence.fit(), evidence.residual_sd)
    low, high = bounds(found.seconds[chosen], sd)
    used = found.memory.device_used
    return [
        RankedLayout(
            layout=found.layouts[row], label=found.layouts[row].label(devices),
            step_time_s=float(found.seconds[row]), low_s=a, high_s=b,
            memory_bytes=float(used[row]), p_oom=float(found.p_oom[row]),
            fits=bool(found.p_oom[row] <= LIKELY),
        )
        for row, a, b in zip(rows, low.tolist(), high.tolist(), strict=True)
    ]  # fmt: skip
