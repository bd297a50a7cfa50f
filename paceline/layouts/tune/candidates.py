"""Find the layouts that the engine can run, with an estimate of each."""

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
from paceline.core.units import pluralize
from paceline.core.window import MIN_STEADY
from paceline.engines import engine
from paceline.estimate.calibrate.calibration import Calibration
from paceline.estimate.calibrate.lookup import FileEvidence, file_or_device_evidence, machine_for
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
from paceline.layouts.search.memory import (
    largest_fitting_budgets,
    layouts_supporting_budgets,
    splits_needing_recompute,
)
from paceline.layouts.search.space import SearchSpace, feasible_layouts
from paceline.layouts.sweep.plan import without_ramp_up
from paceline.machines.placement import Request, choose_cluster
from paceline.machines.probe.inventory import inventory
from paceline.machines.probe.rates import probe_collective, probe_memory
from paceline.runs.compilation import COMPILE, choose_compilation
from paceline.runs.plan import Plan, make_plan, measure_gemm_rate

PROBE_S = 0.1
"""Duration of a probe in seconds, for each payload."""
SINGLE_RANK_LINK_BYTES_PER_S = 1e9
"""Placeholder for the links of a single rank, which does not communicate."""


def probed_machine(spec: RunSpec, local: dict[str, Any]) -> Machine | None:
    """Measure an uncalibrated CPU for the time model; return None if that fails.

    Measures GEMMs and copies on all cores, divided by the number of ranks, and an all-reduce among
    the ranks. That takes a few seconds.
    """
    cluster = spec.cluster
    if cluster.device != "cpu" or not cluster.runs_here:
        return None
    try:
        return _measured_machine(
            spec, local, machine("cpu", devices_per_node=cluster.devices_per_node)
        )
    except SystemFaultError:
        return None


def _measured_machine(spec: RunSpec, local: dict[str, Any], nominal: Machine) -> Machine | None:
    ranks, cores = spec.world_size, local["cpu"]["usable_cores"]
    gemm_rates = measure_gemm_rate(spec, local)
    best = gemm_rates.best(spec.training.dtype) if gemm_rates else None
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
    link = SINGLE_RANK_LINK_BYTES_PER_S
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
        notes=("this CPU is not calibrated; its rates were measured briefly before the search",),
    )


MAX_CANDIDATES = 4000
"""Layouts that a search keeps in sight: by estimate the fastest that may fit, then the others."""
LAYOUT_FIELDS = (
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
"""Layout fields that a candidate sets."""


@dataclass(frozen=True)
class Candidates:
    """Candidate layouts; all arrays have one row per layout."""

    request: Request
    """The user's request without a batch ramp-up."""
    recipe: Recipe
    spec: RunSpec
    """Run specification of any candidate; only the layout differs."""
    evidence: Evidence
    """Coefficients of the time model before any run."""
    layouts: tuple[Layout, ...]
    recipe_row: int | None
    """Row of the recipe's own layout; None if it cannot run on the devices."""
    x: Cases | None
    """Inputs of the time model; None without rates."""
    seconds: Floats
    """Expected step times before any run; all 1 without rates."""
    memory_bytes: Floats
    p_oom: Floats
    """Estimated probability of running out of memory, 0-1."""
    limit_bytes: Floats
    """Memory limit of a device; infinite if unknown."""
    num_infeasible: int
    num_beyond: int
    """Number of layouts dropped because there are too many."""
    notices: tuple[str, ...]

    @property
    def likely_to_fit(self) -> Bools:
        """True for layouts that are not certain to run out of memory."""
        return self.p_oom <= MAX_P_OOM_TO_RUN

    def plan(self, row: int) -> Plan:
        """Return the plan of a layout; raise UserError if it cannot run."""
        return make_plan(with_layout(self.request, self.layouts[row]))


def with_layout(request: Request, layout: Layout) -> Request:
    """Return the request with a layout."""
    return replace(request, overrides=(*request.overrides, *layout_overrides(layout)))


def layout_overrides(layout: Layout) -> list[str]:
    """Return the `key=value` overrides of a layout."""
    values = layout.model_dump(include=set(LAYOUT_FIELDS))
    return [f"layout.{name}={_yaml(values[name])}" for name in LAYOUT_FIELDS]


def find_candidates(
    request: Request, evidence_request: FileEvidence | None, space: SearchSpace
) -> Candidates:
    """Return every layout of the space that the engine can run.

    Without `evidence_request`, use the device's calibration, or the one that comes with Paceline.
    Raises UserError if no layout can run.
    """
    request, notices = without_ramp_up(request)
    local = inventory()
    recipe = load_recipe(request.recipe, request.variant, request.overrides)
    if recipe.training.steps < MIN_STEADY:
        raise UserError(
            f"{recipe.name}: {pluralize(recipe.training.steps, 'step')}",
            "is too few for a result",
            allowed=f"warm-up and at least {MIN_STEADY} steady steps",
            remedy="--steps 20",
        )
    request = _with_equal_compilation(request, recipe, local, space)
    spec, plan_notices, layouts, num_refused = _runnable_layouts(request, recipe, local, space)
    runs_as_it_is = _can_run(spec, recipe.layout)
    if runs_as_it_is and recipe.layout not in layouts:
        layouts = [recipe.layout, *layouts]
    cluster, rates = spec.cluster, evidence_request.calibration if evidence_request else None
    evidence = file_or_device_evidence(
        evidence_request, cluster.device, spec.training.dtype, cluster.device_label
    )
    machine, notes = _machine(spec, local, rates)
    seconds = memory_bytes = np.ones(len(layouts))
    odds, limit, x = np.zeros(len(layouts)), np.full(len(layouts), inf), None
    if machine is not None:
        estimated = partial(estimates_of_layouts, spec, machine, evidence)
        layouts += _budgets(spec, layouts, estimated)
        estimates = estimated(layouts)
        x, seconds, odds = estimates.x, estimates.step_time_s, estimates.p_oom
        memory_bytes, limit = estimates.memory.device_used, estimates.limit_bytes
    recipe_row = layouts.index(recipe.layout) if runs_as_it_is else None
    kept_rows = _best_rows(seconds, odds, recipe_row)
    num_beyond = len(layouts) - len(kept_rows)
    notes += (
        [f"{pluralize(num_beyond, 'slower layout')} dropped according to the estimate"]
        if num_beyond
        else []
    )
    return Candidates(
        request=request,
        recipe=recipe,
        spec=spec,
        evidence=evidence,
        layouts=tuple(layouts[row] for row in kept_rows),
        recipe_row=None if recipe_row is None else kept_rows.tolist().index(recipe_row),
        x=x.pick(kept_rows) if x else None,
        seconds=seconds[kept_rows],
        memory_bytes=memory_bytes[kept_rows],
        p_oom=odds[kept_rows],
        limit_bytes=limit[kept_rows],
        num_infeasible=num_refused,
        num_beyond=num_beyond,
        notices=tuple(dict.fromkeys((*notices, *plan_notices, *notes))),
    )


def _with_equal_compilation(
    request: Request, recipe: Recipe, local: dict[str, Any], space: SearchSpace
) -> Request:
    """Compile blocks in all layouts or in none, if the recipe leaves it open.

    Compile none if compilation would rule out layouts.
    """
    if recipe.training.compile != "auto":
        return request
    plain, compiled = (
        replace(request, overrides=(*request.overrides, f"{COMPILE}={value}"))
        for value in ("none", "blocks")
    )
    spec, _, layouts, _ = _runnable_layouts(plain, recipe, local, space)
    spec, _ = choose_compilation(with_compile(spec, "auto"), "auto")
    pays = spec.training.compile == "blocks" and all(_can_run(spec, layout) for layout in layouts)
    return compiled if pays else plain


def _machine(
    spec: RunSpec, local: dict[str, Any], rates: Calibration | None
) -> tuple[Machine | None, list[str]]:
    """Return the machine, or None if it has no rates, and notes about it."""
    notes: list[str] = []
    try:
        machine = machine_for(spec.cluster, spec.training.dtype, cpu_calibration=rates)
    except UserError:
        if spec.cluster.device != "cpu":
            raise
        machine = probed_machine(spec, local)
        notes += machine.notes if machine else ()
    if machine and spec.training.dtype == "bf16" and machine.device.has_only_fp16:
        return None, notes  # bf16 is emulated, at an unknown rate
    return machine, notes


def _budgets(
    spec: RunSpec, layouts: list[Layout], estimated: Callable[[list[Layout]], Estimates]
) -> list[Layout]:
    """Return layouts with a recompute budget, where only full checkpointing fits otherwise.

    Each split contributes the largest budget that probably fits, and the largest that certainly
    fits.
    """
    odds, budget_layouts, existing = estimated(layouts).p_oom, list[Layout](), set(layouts)
    for bound in (MAX_P_OOM_TO_FIT, UNLIKELY):
        full = (layouts[choice.full] for choice in splits_needing_recompute(layouts, odds, bound))
        supported_layouts = layouts_supporting_budgets(spec, full)
        budget_layouts += largest_fitting_budgets(
            supported_layouts, lambda some: estimated(some).p_oom, bound
        )
    return [layout for layout in dict.fromkeys(budget_layouts) if layout not in existing]


def _best_rows(
    seconds: Floats, odds: Floats, recipe_row: int | None
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the rows of the best candidates and of the recipe's own layout, in order.

    Layouts that run out of memory rank last: they are often the fastest otherwise.
    """
    best_first = np.lexsort((seconds, odds > MAX_P_OOM_TO_RUN))
    rows = set(best_first[:MAX_CANDIDATES].tolist()) | (
        set() if recipe_row is None else {recipe_row}
    )
    return np.array(sorted(rows), dtype=np.int64)


def _runnable_layouts(
    request: Request, recipe: Recipe, local: dict[str, Any], space: SearchSpace
) -> tuple[RunSpec, tuple[str, ...], list[Layout], int]:
    """Return (a run specification, notices, layouts that can run, number that cannot)."""
    cluster, _ = choose_cluster(request, recipe, local)
    batch = recipe.training.batch(cluster.world_size, cluster.nodes)
    valid, num_refused = feasible_layouts(
        recipe.model,
        cluster.world_size,
        batch,
        recipe.training.seq_len,
        space.around(recipe.layout),
    )
    where, why = f"{recipe.name} on {cluster.world_size} x {cluster.device}", "no layout divides it"
    # With one copy of the states, ZeRO has nothing to shard.
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
        layouts = [other for other in valid if _can_run(plan.spec, other)]
        return plan.spec, plan.notices, layouts, num_refused + len(valid) - len(layouts)
    raise UserError(where, f"has no layout that can run: {why}")


def _can_run(spec: RunSpec, layout: Layout) -> bool:
    """Return whether the engine can run the layout."""
    spec_in_layout = spec.model_copy(update={"layout": layout})
    return not layout_problems(spec_in_layout.parallel) and not engine(spec.engine).unsupported(
        spec_in_layout
    )


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower()
