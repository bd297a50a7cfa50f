"""Choice of block compilation, depending on the compilers of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import replace

from paceline.core.compilation import CompileOption
from paceline.core.errors import UserError
from paceline.core.hardware import NARROW, Cluster
from paceline.core.run import RunSpec
from paceline.files.compile_choice import expected_saving, with_compile
from paceline.machines.placement import Request

COMPILE = "training.compile"


def choose_compilation(spec: RunSpec, option: CompileOption) -> tuple[RunSpec, list[str]]:
    """Return the run and its notices; `auto` does not compile blocks without a compiler.

    Raises UserError if compiled blocks were requested, or low precision needs them, and there is
    no compiler.
    """
    if spec.engine != "native" or spec.training.compile == "none" or not spec.cluster.runs_here:
        return spec, []
    is_automatic = option == "auto" and spec.training.dtype not in NARROW
    names = missing_compiler(spec.cluster)
    if names is None:
        return spec, [f"blocks are compiled: {expected_saving(spec)}"] if is_automatic else []
    if is_automatic:
        return with_compile(spec, "none"), [f"blocks are not compiled: this machine has no {names}"]
    raise UserError(
        f"{COMPILE} {spec.training.compile}",
        f"needs a compiler, and this machine has no {names}",
        remedy=f"install it, set {_variable(spec.cluster)}, or use {COMPILE}=none",
    )


def missing_compiler(cluster: Cluster) -> str | None:
    """Return the compilers that Inductor (CPU) or Triton (GPU) would need; None if it has one."""
    variables = {**os.environ, **cluster.env}
    compiler = variables.get(_variable(cluster))
    names = [compiler] if compiler else ["g++"] if cluster.device == "cpu" else ["gcc", "clang"]
    is_installed = any(shutil.which(name, path=variables.get("PATH")) for name in names)
    return None if is_installed else " or ".join(names)


def with_equal_compilation(request: Request, specs: Iterable[RunSpec]) -> Request | None:
    """Return the request with uncompiled blocks for all runs; None if they are equal already.

    `auto` depends on a run's length. Runs that are compared must not differ in it.
    """
    if len({spec.training.compile for spec in specs}) < 2:
        return None
    return replace(request, overrides=(*request.overrides, f"{COMPILE}=none"))


def _variable(cluster: Cluster) -> str:
    return "CXX" if cluster.device == "cpu" else "CC"
