"""The meaning of `training.compile: auto` for one run."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.compilation import Compile, CompileOption, CompileSaving, Work, saving
from paceline.core.errors import UserError
from paceline.core.hardware import NARROW, Cluster, Dtype
from paceline.core.layout_checks import native_problems
from paceline.core.run import RunSpec
from paceline.files import catalog


def with_compile(spec: RunSpec, option: CompileOption) -> RunSpec:
    """Return the run with compilation as requested, or with `auto` decided by the expected
    saving."""
    mode = _compile_mode(spec, option)
    if mode == spec.training.compile:
        return spec
    return spec.model_copy(update={"training": spec.training.model_copy(update={"compile": mode})})


def expected_saving(spec: RunSpec) -> CompileSaving | None:
    """Return the time that compiled blocks save over all steps, None without a measurement.

    While a batch ramps up, each step counts as one of the smallest batch.
    """
    training, cluster = spec.training, spec.cluster
    work = Work(
        spec.model,
        spec.lora,
        training.dtype,
        training.seq_len,
        training.batches[0] / spec.world_size,
        training.steps,
    )
    if cluster.device == "cpu":
        return saving(work, threads=cluster.threads_per_device or 0)
    return saving(work, peak=_peak(cluster, training.dtype))


def _compile_mode(spec: RunSpec, option: CompileOption) -> Compile:
    native = spec.engine == "native"
    if native and spec.training.dtype in NARROW and spec.cluster.device != "cpu":
        # Without fusion, scaling and casting are separate passes over every operand.
        return "blocks"
    if option != "auto":
        return option
    # It is unknown whether other hosts have the compiler that Inductor calls.
    runs_here = spec.cluster.runs_here
    expected = expected_saving(spec) if native and runs_here else None
    return "blocks" if expected and expected.pays and _can_be_compiled(spec) else "none"


def _can_be_compiled(spec: RunSpec) -> bool:
    """Return True if the layout's rules allow compiled blocks."""
    without, compiled = (
        native_problems(replace(spec.parallel, compiled=compiled)) for compiled in (False, True)
    )
    return without == compiled


def _peak(cluster: Cluster, dtype: Dtype) -> float | None:
    try:
        return catalog.device(cluster.device).peak_flops_per_s(dtype)
    except UserError:
        return None
