"""Compiled blocks on this machine: whether it has the compiler they need, and what is told."""

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


def compiled_here(spec: RunSpec, asked: CompileOption) -> tuple[RunSpec, list[str]]:
    """(the run, its blocks uncompiled where `auto` finds no compiler; what is to be told).

    Raises UserError where compiled blocks were asked for, or low precision needs them, and there is
    no compiler.
    """
    if spec.engine != "native" or spec.training.compile == "none" or not spec.cluster.runs_here:
        return spec, []
    by_itself = asked == "auto" and spec.training.dtype not in NARROW
    names = missing_compiler(spec.cluster)
    if names is None:
        return spec, [f"blocks are compiled: {expected_saving(spec)}"] if by_itself else []
    if by_itself:
        return with_compile(spec, "none"), [f"blocks are not compiled: there is no {names}"]
    raise UserError(
        f"{COMPILE} {spec.training.compile}",
        f"needs a compiler, and there is no {names}",
        remedy=f"install it, name another in {_variable(spec.cluster)}, or use {COMPILE}=none",
    )


def missing_compiler(cluster: Cluster) -> str | None:
    """What Inductor (CPU) or Triton (GPU) calls and does not find here; None when it is there."""
    variables = {**os.environ, **cluster.env}
    named = variables.get(_variable(cluster))
    names = [named] if named else ["g++"] if cluster.device == "cpu" else ["gcc", "clang"]
    found = any(shutil.which(name, path=variables.get("PATH")) for name in names)
    return None if found else " or ".join(names)


def equally_compiled(request: Request, specs: Iterable[RunSpec]) -> Request | None:
    """The request with blocks of all runs uncompiled; None where they are equal already.

    Runs that are held against each other must not differ in what only their length decides.
    """
    if len({spec.training.compile for spec in specs}) < 2:
        return None
    return replace(request, overrides=(*request.overrides, f"{COMPILE}=none"))


def _variable(cluster: Cluster) -> str:
    return "CXX" if cluster.device == "cpu" else "CC"
