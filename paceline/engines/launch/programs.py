"""The Job of a program that is none of Paceline's trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Literal

from paceline.core.hardware import with_secrets
from paceline.core.job import Job
from paceline.core.run import RunSpec

STARTER_FILE = "starter_program.py"
WORKING_FOLDER = "PACELINE_WORKING_FOLDER"


def launch(
    spec: RunSpec,
    name: str,
    argv: Sequence[str],
    *,
    python: str,
    env: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    per: Literal["device", "node"] = "device",
    folder: Path | None = None,
    writes_steps: bool = False,
) -> Job:
    """The Job that starts `argv` once per device, or once per node, on whatever launches it.

    `python` runs the starter, and is what `{python}` in `argv` stands for. `folder` is where the
    program works, None the run folder. `writes_steps` has $PACELINE_STEPS name the folder of event
    lines. The cluster's own variables win over `env`.
    """
    starter = (resources.files(__package__ or "") / STARTER_FILE).read_text(encoding="utf-8")
    cluster = spec.cluster
    how = "node" if per == "node" else "rank"
    sizes = (str(cluster.nodes), str(cluster.devices_per_node), str(int(writes_steps)))
    return Job(
        name=name,
        python=python,
        program=(STARTER_FILE, how, *sizes, *argv),
        env=_environment(spec, env or {}, folder),
        files={**(files or {}), STARTER_FILE: starter},
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        launches_once=per == "node",
        timeout_s=spec.time_limit_s,
        collective_limit_s=2 * spec.hang_limit_s,
        cluster=cluster,
        sampled=True,
    )


def program_file(package: str, name: str) -> dict[str, str]:
    """A program of ours in an engine's `package`, as a file of the Job that starts it."""
    return {name: (resources.files(package) / name).read_text(encoding="utf-8")}


def unknown_settings(spec: RunSpec, known: Sequence[str]) -> list[str]:
    """A sentence for each of the run's engine settings that its engine does not know."""
    allowed = ", ".join(known) or "none"
    return [
        f"engine_settings.{name} is not known to engine {spec.engine}: it takes {allowed}"
        for name in spec.engine_settings
        if name not in known
    ]


def native_settings(spec: RunSpec) -> list[str]:
    """Fields of the run that only the native trainer knows, where they are set."""
    training = spec.training
    fields = {
        "training.ramp_up": training.ramp_up,
        "training.evaluation": training.evaluation,
        "training.initial_weights": training.initial_weights,
        "checkpoint.every": spec.checkpoint.every,
        "checkpoint.resume": spec.checkpoint.resume,
        "mlperf": spec.mlperf,
        "memory_limit_bytes": spec.memory_limit_bytes,
    }
    return [name for name, value in fields.items() if value is not None]


def _environment(spec: RunSpec, env: Mapping[str, str], folder: Path | None) -> dict[str, str]:
    variables = {"PYTHONUNBUFFERED": "1"}
    if spec.cluster.threads_per_device:
        variables["OMP_NUM_THREADS"] = str(spec.cluster.threads_per_device)
    if folder is not None:
        variables[WORKING_FOLDER] = str(folder)
    return {**variables, **env} | with_secrets(spec.cluster.env, os.environ)
