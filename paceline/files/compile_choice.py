"""What `training.compile: auto` of a recipe comes to in one run."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.compilation import Compile, CompileOption, CompileSaving, Work, saving
from paceline.core.errors import UserError
from paceline.core.hardware import NARROW, Cluster, Dtype
from paceline.core.layout_checks import native_problems
from paceline.core.run import RunSpec
from paceline.files import catalog


def with_compile(spec: RunSpec, asked: CompileOption) -> RunSpec:
    """The run with its blocks compiled or not, as was asked or as it pays."""
    taken = _taken(spec, asked)
    if taken == spec.training.compile:
        return spec
    return spec.model_copy(update={"training": spec.training.model_copy(update={"compile": taken})})


def expected_saving(spec: RunSpec) -> CompileSaving | None:
    """What compiled blocks save in all steps of a run; None where no measurement tells.

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


def _taken(spec: RunSpec, asked: CompileOption) -> Compile:
    native = spec.engine == "native"
    if native and spec.training.dtype in NARROW and spec.cluster.device != "cpu":
        # Scaling and casting are passes of their own over every operand unless they are fused.
        return "blocks"
    if asked != "auto":
        return asked
    # Nobody has looked whether other hosts have the compiler that Inductor calls.
    here = spec.cluster.runs_here
    expected = expected_saving(spec) if native and here else None
    return "blocks" if expected and expected.pays and _can_be_compiled(spec) else "none"


def _can_be_compiled(spec: RunSpec) -> bool:
    """Whether the layout's rules say nothing against compiled blocks."""
    without, compiled = (
        native_problems(replace(spec.parallel, compiled=compiled)) for compiled in (False, True)
    )
    return without == compiled


def _peak(cluster: Cluster, dtype: Dtype) -> float | None:
    try:
        return catalog.device(cluster.device).peak_flops_per_s(dtype)
    except UserError:
        return None
