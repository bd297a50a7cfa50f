"""Plans of runs under a profiler, and their profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import UserError
from paceline.core.result import Metric, finite_value
from paceline.core.run import RunSpec
from paceline.core.run_report import RunReport
from paceline.core.steps import Steps
from paceline.core.training import Profiling, ToolName
from paceline.core.units import pluralize
from paceline.engines import engine
from paceline.files.documents import write_text, write_value
from paceline.machines.node.binding import with_binding
from paceline.profiles.profile import PROFILE_FILE, PROFILE_PAGE, Overhead, Profile, waterfall
from paceline.profiles.tools import tool
from paceline.runs.plan import Plan
from paceline.runs.profile_report import profile_document

STEPS_AFTER = 10
"""Number of steps after the last profiled one, for comparison of the step time."""
WARM_UP = 5
"""Number of first steps of a run, which are not representative."""


def with_profile(
    plan: Plan,
    name: ToolName,
    ranks: Sequence[int] | None,
    first_step: int,
    last_step: int,
    **options: bool,
) -> Plan:
    """Return the plan of the same training under a profiler, with as many steps as needed.

    By default, one rank of each pipeline stage and each node is profiled. Raises UserError if the
    tool cannot be attached, or a rank does not exist.
    """
    spec = plan.spec
    rank_numbers = tuple(sorted(set(ranks))) if ranks else default_ranks(spec)
    if rank_numbers[-1] >= spec.world_size:
        raise UserError(
            f"--ranks {rank_numbers[-1]}",
            "is not a rank of the run",
            allowed=f"0 to {spec.world_size - 1}",
        )
    profile = Profiling(
        tool=name, ranks=rank_numbers, first_step=first_step, last_step=last_step, **options
    )
    training = spec.training.model_copy(update={"steps": last_step + STEPS_AFTER})
    spec = spec.model_copy(update={"profile": profile, "training": training})
    profiler = tool(name)
    if problem := profiler.unsupported(spec):
        raise UserError(f"--tool {name}", problem)
    job = with_binding(engine(spec.engine).job(spec, spec.recipe))
    return replace(plan, spec=spec, job=profiler.attach(job, spec))


def length_text(spec: RunSpec) -> str:
    """Return a notice of the number of steps of a profile run, which ignores `steps`."""
    assert spec.profile is not None, "it is a profile run"
    return (
        f"the run has {pluralize(spec.training.steps, 'step')} (--set steps is ignored): up to the "
        f"last profiled step, {spec.profile.last_step}, and {STEPS_AFTER} for comparison; choose "
        "the profiled steps with --steps A-B"
    )


def default_ranks(spec: RunSpec) -> tuple[int, ...]:
    """Return the first rank of every pipeline stage and of every node."""
    stages = range(0, spec.world_size, max(spec.world_size // spec.layout.pp, 1))
    nodes = range(0, spec.world_size, spec.cluster.devices_per_node)
    return tuple(sorted({*stages, *nodes}))


def write_profile(report: RunReport) -> Profile:
    """Read the profile of an ended run, write it next to the run's result, and return it.

    Raises UserError if the tool has left no readable files.
    """
    profile, folder = profile_of_run(report), Path(report.folder)
    write_value(folder / PROFILE_FILE, profile)
    write_text(folder / PROFILE_PAGE, profile_page(profile, report.result.recipe))
    return profile


def profile_of_run(report: RunReport) -> Profile:
    """Return the profile of an ended run; raise UserError if its tool left no readable files."""
    spec, folder = report.spec, Path(report.folder)
    assert spec is not None and spec.profile is not None, "it is a profile run"
    settings = spec.profile
    profile = tool(settings.tool).read(folder)
    fields = {"run": folder.name, "overhead": overhead(report.steps, settings)}
    return profile.model_copy(
        update={**fields, **_waterfall_fields(profile, report.result.metrics)}
    )


def profile_page(profile: Profile, recipe: str) -> str:
    """Return a profile as a page."""
    from paceline.report.html import render_document  # Importing Altair is slow.

    return render_document(profile_document(profile, recipe))


def _waterfall_fields(profile: Profile, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Return the MFU waterfall and the source of its peak; empty if the peak is unknown.

    The peak is the device's, or on a CPU the measured GEMM throughput.
    """
    rate, step_s = (
        finite_value(metrics.get(name)) for name in ("model_flops_per_s_per_device", "step_time_s")
    )
    name = "mfu" if finite_value(metrics.get("mfu")) else "achievable_fraction"
    share = finite_value(metrics.get(name))
    if not rate or not step_s or not share:
        return {}
    levels = waterfall(profile, rate * step_s, rate / share)
    return {"waterfall": levels, "peak_source": metrics[name].source}


def overhead(steps: Steps, settings: Profiling) -> Overhead:
    """Compare profiled steps with the other steps of the same run.

    The first WARM_UP steps and the two next to the profiled ones, in which the tool starts and
    stops, are excluded.
    """
    if settings.tool == "nccl":
        return Overhead(fraction=None, why="every step is logged or counted")
    times, number = steps["step_time_s"], steps.index
    is_finite = np.isfinite(times)
    is_profiled = is_finite & (number >= settings.first_step) & (number <= settings.last_step)
    is_near = (number >= settings.first_step - 1) & (number <= settings.last_step + 1)
    is_plain = is_finite & ~is_near & (number > WARM_UP)
    if not is_profiled.any() or not is_plain.any():
        which = "profiled" if is_plain.any() else "other"
        return Overhead(fraction=None, why=f"the run has no {which} steps to compare with")
    profiled_s, plain_s = float(np.median(times[is_profiled])), float(np.median(times[is_plain]))
    return Overhead(
        fraction=profiled_s / plain_s - 1,
        profiled_s=profiled_s,
        plain_s=plain_s,
        n_profiled=int(is_profiled.sum()),
        n_plain=int(is_plain.sum()),
    )
