"""What a tuning may try: layouts that the engine can run, and what is expected of each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hardware import Peak
from paceline.core.layout import AXIS_FIELDS, Layout
from paceline.core.layout_checks import layout_problems
from paceline.core.run import RunSpec
from paceline.core.units import counted
from paceline.core.window import MIN_STEADY
from paceline.engines import engine
from paceline.estimate.calibrate.calibration import Calibration
from paceline.estimate.calibrate.lookup import GivenEvidence, given_or_own, machine_for
from paceline.estimate.estimates import (
    MAX_P_OOM_TO_FIT,
    MAX_P_OOM_TO_RUN,
    Estimates,
    estimates_of_layouts,
)
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.memory.device_memory import UNLIKELY
from paceline.estimate.model.case import Bools, Cases, Floats
from paceline.estimate.model.machine import Machine, machine
from paceline.files.compile_choice import with_compile
from paceline.files.recipe import Recipe, load_recipe
from paceline.layouts.search.memory import between, largest_that_fit, that_take_budgets
from paceline.layouts.search.space import Space, feasible
from paceline.layouts.sweep.plan import steady_batch
from paceline.machines.placement import Request, choose_cluster
from paceline.machines.probe.inventory import inventory
from paceline.machines.probe.rates import probe_collective, probe_memory
from paceline.runs.compilation import COMPILE, compiled_here
from paceline.runs.plan import Plan, make_plan, reachable_rate

PROBE_S = 0.1
"""For each payload of a probe."""
ALONE_BYTES_PER_S = 1e9
"""Stands for the links of a single rank, which exchanges nothing."""


def probed_machine(spec: RunSpec, local: dict[str, Any]) -> Machine | None:
    """A processor that is not calibrated, as the time model takes it; None where that fails.

    Its rates are measured: matrix products and copies on all cores, of which a rank has its share,
    and an all-reduce among the ranks. That takes a few seconds.
    """
    cluster = spec.cluster
    if cluster.device != "cpu" or not cluster.runs_here:
        return None
    try:
        return _measured(spec, local, machine("cpu", devices_per_node=cluster.devices_per_node))
    except SystemFaultError:
        return None


def _measured(spec: RunSpec, local: dict[str, Any], nominal: Machine) -> Machine | None:
    ranks, cores = spec.world_size, local["cpu"]["usable_cores"]
    products = reachable_rate(spec, local)
    best = products.best(spec.training.dtype) if products else None
    if best is None:
        return None
    python = spec.cluster.python or sys.executable
    copies = probe_memory(python, "cpu", cores, PROBE_S).rows[-1]
    peak = Peak(flops_per_s=best.flops_per_s / ranks, source="measured here")
    device = nominal.device.model_copy(
        update={
            "peaks": {spec.training.dtype: peak, "bf16": peak, "fp32": peak},
            "memory_bytes": spec.cluster.device_memory_bytes,
            "memory_bytes_per_s": copies.bytes_per_s / ranks,
        }
    )
    link = ALONE_BYTES_PER_S
    if ranks > 1:
        threads = spec.cluster.threads_per_device
        link = probe_collective(python, "cpu", ranks, threads, PROBE_S).rows[-1].bus_bytes_per_s
    return replace(
        nominal,
        device=device,
        generation="cpu",
        domain=ranks,
        devices_per_node=ranks,
        intra_bytes_per_s=link,
        inter_bytes_per_s=link,
        notes=(
            "this processor is not calibrated; its rates were measured just now, in a few seconds",
        ),
    )


MOST = 4000
"""Layouts that a search keeps in sight: by estimate the fastest that may fit, then the others."""
VARIED = (
    *AXIS_FIELDS,
    "micro_batch",
    "zero_stage",
    "recompute",
    "recompute_budget",
    "schedule",
    "sequence_parallel",
    "dp_shard",
    "cp_exchange",
)
"""Fields of a layout that a candidate sets."""


@dataclass(frozen=True)
class Candidates:
    """Layouts by row."""

    request: Request
    """As it was asked for, without the ramp-up."""
    recipe: Recipe
    spec: RunSpec
    """Of any of them: all but the layout is the same."""
    evidence: Evidence
    """Coefficients of the time model before any run."""
    layouts: tuple[Layout, ...]
    recipe_row: int | None
    """The row of the recipe's own layout, None where it cannot run on the devices."""
    x: Cases | None
    """As the time model sees them; None where it has no rates."""
    seconds: Floats
    """Expected before any run, all 1 where the time model has no rates."""
    memory_bytes: Floats
    p_oom: Floats
    """By the estimate alone."""
    limit_bytes: Floats
    """What a device may have in use, infinite where nobody knows."""
    num_infeasible: int
    num_beyond: int
    """Layouts that were left out because there are too many."""
    notices: tuple[str, ...]

    @property
    def likely_to_fit(self) -> Bools:
        """Where a try is not sure to end for lack of memory."""
        return self.p_oom <= MAX_P_OOM_TO_RUN

    def plan(self, row: int) -> Plan:
        """The plan of one; raises UserError when it cannot run after all."""
        return make_plan(with_layout(self.request, self.layouts[row]))


def with_layout(request: Request, layout: Layout) -> Request:
    """The request in that layout."""
    return replace(request, overrides=(*request.overrides, *settings(layout)))


def settings(layout: Layout) -> list[str]:
    """`key=value` of all that a candidate sets."""
    values = layout.model_dump(include=set(VARIED))
    return [f"layout.{name}={_yaml(values[name])}" for name in VARIED]


def candidates(request: Request, given: GivenEvidence | None, space: Space) -> Candidates:
    """Every layout of the space that the engine can run; raises UserError when there is none.

    `given` None is the device's calibration where there is one, else what comes with Paceline.
    """
    request, notices = steady_batch(request)
    local = inventory()
    recipe = load_recipe(request.recipe, request.variant, request.overrides)
    if recipe.training.steps < MIN_STEADY:
        raise UserError(
            f"{recipe.name}: {counted(recipe.training.steps, 'step')}",
            "give no trial a figure",
            allowed=f"the warm-up and at least {MIN_STEADY} steady ones",
            remedy="--steps 20",
        )
    request = _equally_compiled(request, recipe, local, space)
    spec, plan_notices, layouts, refused = _possible(request, recipe, local, space)
    runs_as_it_is = _runs(spec, recipe.layout)
    if runs_as_it_is and recipe.layout not in layouts:
        layouts = [recipe.layout, *layouts]
    cluster, rates = spec.cluster, given.calibration if given else None
    evidence = given_or_own(given, cluster.device, spec.training.dtype, cluster.device_label)
    machine, notes = _machine(spec, local, rates)
    seconds = needed = np.ones(len(layouts))
    odds, limit, x = np.zeros(len(layouts)), np.full(len(layouts), inf), None
    if machine is not None:
        estimated = partial(estimates_of_layouts, spec, machine, evidence)
        layouts += _budgets(spec, layouts, estimated)
        estimates = estimated(layouts)
        x, seconds, odds = estimates.x, estimates.step_time_s, estimates.p_oom
        needed, limit = estimates.memory.device_used, estimates.limit_bytes
    recipe_row = layouts.index(recipe.layout) if runs_as_it_is else None
    kept = _kept(seconds, odds, recipe_row)
    beyond = len(layouts) - len(kept)
    notes += (
        [f"{counted(beyond, 'more layout', 'are')} left out, by the estimate"] if beyond else []
    )
    return Candidates(
        request=request,
        recipe=recipe,
        spec=spec,
        evidence=evidence,
        layouts=tuple(layouts[row] for row in kept),
        recipe_row=None if recipe_row is None else kept.tolist().index(recipe_row),
        x=x.pick(kept) if x else None,
        seconds=seconds[kept],
        memory_bytes=needed[kept],
        p_oom=odds[kept],
        limit_bytes=limit[kept],
        num_infeasible=refused,
        num_beyond=beyond,
        notices=tuple(dict.fromkeys((*notices, *plan_notices, *notes))),
    )


def _equally_compiled(
    request: Request, recipe: Recipe, local: dict[str, Any], space: Space
) -> Request:
    """The request with blocks compiled in all layouts or in none, where the recipe leaves it open.

    In none where that would take layouts away.
    """
    if recipe.training.compile != "auto":
        return request
    plain, compiled = (
        replace(request, overrides=(*request.overrides, f"{COMPILE}={value}"))
        for value in ("none", "blocks")
    )
    spec, _, layouts, _ = _possible(plain, recipe, local, space)
    spec, _ = compiled_here(with_compile(spec, "auto"), "auto")
    pays = spec.training.compile == "blocks" and all(_runs(spec, layout) for layout in layouts)
    return compiled if pays else plain


def _machine(
    spec: RunSpec, local: dict[str, Any], rates: Calibration | None
) -> tuple[Machine | None, list[str]]:
    """(the devices of the run, None where they have no rates; what is to be said of these)."""
    notes: list[str] = []
    try:
        machine = machine_for(spec.cluster, spec.training.dtype, given=rates)
    except UserError:
        if spec.cluster.device != "cpu":
            raise
        machine = probed_machine(spec, local)
        notes += machine.notes if machine else ()
    if machine and spec.training.dtype == "bf16" and machine.device.has_only_fp16:
        return None, notes  # it emulates bf16, at a rate that nobody states
    return machine, notes


def _budgets(
    spec: RunSpec, layouts: list[Layout], estimated: Callable[[list[Layout]], Estimates]
) -> list[Layout]:
    """Layouts that recompute by a budget, where memory may not suffice without and does with full.

    Of each cut the largest that rather fits and, should memory run out all the same, the largest
    that fits beyond doubt.
    """
    odds, found, known = estimated(layouts).p_oom, list[Layout](), set(layouts)
    for bound in (MAX_P_OOM_TO_FIT, UNLIKELY):
        full = (layouts[cut.full] for cut in between(layouts, odds, bound))
        cuts = that_take_budgets(spec, full)
        found += largest_that_fit(cuts, lambda some: estimated(some).p_oom, bound)
    return [layout for layout in dict.fromkeys(found) if layout not in known]


def _kept(
    seconds: Floats, odds: Floats, recipe_row: int | None
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The rows of those that are kept, in their order; the recipe's own layout is among them.

    What runs out of memory is often the fastest otherwise, and must not take all the room.
    """
    best_first = np.lexsort((seconds, odds > MAX_P_OOM_TO_RUN))
    kept = set(best_first[:MOST].tolist()) | (set() if recipe_row is None else {recipe_row})
    return np.array(sorted(kept), dtype=np.int64)


def _possible(
    request: Request, recipe: Recipe, local: dict[str, Any], space: Space
) -> tuple[RunSpec, tuple[str, ...], list[Layout], int]:
    """(the run in some layout, notices, layouts that can run, how many cannot)."""
    cluster, _ = choose_cluster(request, recipe, local)
    batch = recipe.training.batch(cluster.world_size, cluster.nodes)
    valid, refused = feasible(
        recipe.model,
        cluster.world_size,
        batch,
        recipe.training.seq_len,
        space.around(recipe.layout),
    )
    where, why = f"{recipe.name} on {cluster.world_size} x {cluster.device}", "no layout divides it"
    # Where a state has one copy, ZeRO has nothing to spread.
    valid = [
        layout
        for layout in valid
        if layout.zero_stage == 0 or layout.dp(cluster.world_size) * layout.cp > 1
    ]
    for layout in valid:
        try:
            plan = make_plan(with_layout(request, layout), local)
        except UserError as error:
            why = error.what
            continue
        layouts = [other for other in valid if _runs(plan.spec, other)]
        return plan.spec, plan.notices, layouts, refused + len(valid) - len(layouts)
    raise UserError(where, f"has no layout that can run: {why}")


def _runs(spec: RunSpec, layout: Layout) -> bool:
    """Whether the engine runs that layout there."""
    changed = spec.model_copy(update={"layout": layout})
    return not layout_problems(changed.parallel) and not engine(spec.engine).unsupported(changed)


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower()
