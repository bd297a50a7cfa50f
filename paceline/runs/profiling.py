"""A profile run: its plan, and what is made of it beside the report of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import UserError
from paceline.core.profiling import Profiling, ToolName
from paceline.core.result import Metric, finite_value
from paceline.core.run import RunSpec
from paceline.core.run_report import RunReport
from paceline.core.steps import Steps
from paceline.core.units import counted
from paceline.engines import engine
from paceline.files.documents import write_text, write_value
from paceline.machines.node.binding import bound
from paceline.profiles.profile import PROFILE_FILE, PROFILE_PAGE, Overhead, Profile
from paceline.profiles.tools import tool
from paceline.profiles.waterfall import waterfall
from paceline.runs.plan import Plan
from paceline.runs.profile_report import profile_document

STEPS_AFTER = 10
"""Steps behind the last profiled one: what the overhead is held against."""
WARM_UP = 5
"""Steps at the begin that are no measure of anything."""


def with_profile(
    plan: Plan,
    name: ToolName,
    ranks: Sequence[int] | None,
    first_step: int,
    last_step: int,
    **more: bool,
) -> Plan:
    """The plan of the same training under a tool, as long as that needs it.

    `ranks` None: one of every pipeline stage and of every node. Raises UserError where the tool
    cannot be attached, or a rank does not exist.
    """
    spec = plan.spec
    chosen = tuple(sorted(set(ranks))) if ranks else default_ranks(spec)
    if chosen[-1] >= spec.world_size:
        raise UserError(
            f"--ranks {chosen[-1]}", "is none of the run's", allowed=f"0 to {spec.world_size - 1}"
        )
    profile = Profiling(tool=name, ranks=chosen, first_step=first_step, last_step=last_step, **more)
    training = spec.training.model_copy(update={"steps": last_step + STEPS_AFTER})
    spec = spec.model_copy(update={"profile": profile, "training": training})
    profiler = tool(name)
    if problem := profiler.unsupported(spec):
        raise UserError(f"--tool {name}", problem)
    job = bound(engine(spec.engine).job(spec, spec.recipe))
    return replace(plan, spec=spec, job=profiler.attach(job, spec))


def length_text(spec: RunSpec) -> str:
    """How long a profile run is and why, whatever its recipe or the user asked for."""
    assert spec.profile is not None, "it is a profile run"
    return (
        f"{counted(spec.training.steps, 'step')} are trained, whatever --set steps says: those "
        f"up to the last profiled one, {spec.profile.last_step}, and {STEPS_AFTER} to hold them "
        "against; --steps A-B moves them"
    )


def default_ranks(spec: RunSpec) -> tuple[int, ...]:
    """The first rank of every pipeline stage, and of every node."""
    stages = range(0, spec.world_size, max(spec.world_size // spec.layout.pp, 1))
    nodes = range(0, spec.world_size, spec.cluster.devices_per_node)
    return tuple(sorted({*stages, *nodes}))


def write_profile(report: RunReport) -> Profile:
    """What the tool says of a run that is over, as it is written beside the run's result.

    Raises UserError where the tool has left nothing that can be read.
    """
    spec, folder = report.spec, Path(report.folder)
    assert spec is not None and spec.profile is not None, "it is a profile run"
    asked = spec.profile
    profile = tool(asked.tool).read(folder)
    added = {"run": folder.name, "overhead": overhead(report.steps, asked)}
    profile = profile.model_copy(update={**added, **_from_peak(profile, report.result.metrics)})
    write_value(folder / PROFILE_FILE, profile)
    from paceline.report.html import render_document  # Altair takes long to import.

    page = render_document(profile_document(profile, spec.recipe))
    write_text(folder / PROFILE_PAGE, page)
    return profile


def _from_peak(profile: Profile, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """The way from the device's peak, or on a CPU from what its best matrix product reached, and
    what that is; empty where neither is known."""
    rate, step_s = (
        finite_value(metrics.get(name)) for name in ("model_flops_per_s_per_device", "step_time_s")
    )
    name = "mfu" if finite_value(metrics.get("mfu")) else "achievable_fraction"
    share = finite_value(metrics.get(name))
    if not rate or not step_s or not share:
        return {}
    levels = waterfall(profile, rate * step_s, rate / share)
    return {"waterfall": levels, "peak_source": metrics[name].source}


def overhead(steps: Steps, asked: Profiling) -> Overhead:
    """Profiled steps held against the others of the same run, without those beside them, in which
    the tool begins and ends, and without the first WARM_UP ones."""
    if asked.tool == "nccl":
        return Overhead(fraction=None, why="every step is logged or counted")
    times, number = steps["step_time_s"], steps.index
    sound = np.isfinite(times)
    inside = sound & (number >= asked.first_step) & (number <= asked.last_step)
    beside = (number >= asked.first_step - 1) & (number <= asked.last_step + 1)
    plain = sound & ~beside & (number > WARM_UP)
    if not inside.any() or not plain.any():
        which = "profiled" if plain.any() else "other"
        return Overhead(fraction=None, why=f"the run has no {which} steps to hold against")
    profiled_s, plain_s = float(np.median(times[inside])), float(np.median(times[plain]))
    return Overhead(
        fraction=profiled_s / plain_s - 1,
        profiled_s=profiled_s,
        plain_s=plain_s,
        n_profiled=int(inside.sum()),
        n_plain=int(plain.sum()),
    )
