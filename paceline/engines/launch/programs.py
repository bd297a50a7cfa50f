"""Job for any program other than Paceline's own trainer, and sbatch's arguments for batch scripts.

Third-party batch scripts get their arguments in the form of published benchmarks.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from paceline.core.hardware import Cluster, with_secrets
from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.training import DEFAULT_TIME_LIMIT_S
from paceline.engines.launch.extra_settings import (
    ARGUMENTS,
    COMMON_SETTINGS,
    common_problems,
    extra_environment,
    with_extra_arguments,
)
from paceline.files.run_folder import NCCL_LOG_FILE


def needs_queue(spec: RunSpec) -> list[str]:
    """Return in a sentence why a batch script cannot be submitted for `spec`."""
    number = spec.cluster.allocation
    if not spec.cluster.capabilities.batch_scripts:
        return [f"engine {spec.engine} submits a batch script and needs Slurm (--launcher slurm)"]
    if number is not None:
        return [f"engine {spec.engine} submits a batch script and cannot use allocation {number}"]
    return []


def requested_limit_s(spec: RunSpec) -> float | None:
    """Return the requested time limit in seconds.

    Returns None for the default of recipes, so that the script's own limit applies.
    """
    return None if spec.time_limit_s == DEFAULT_TIME_LIMIT_S else spec.time_limit_s


def site_options(cluster: Cluster, *, gpus: bool) -> tuple[str, ...]:
    """Return the site's sbatch options, account and partition first, without nodes.

    `gpus` requests the GPUs of a node if `cluster.slurm.gres` is not set. Without `gpus`, the
    script's own #SBATCH lines decide.
    """
    options = cluster.slurm.options()
    options.pop("cpus-per-task", None)
    if gpus and cluster.slurm.gres is None and cluster.device != "cpu":
        options["gres"] = f"gpu:{cluster.devices_per_node}"
    if cluster.hosts:
        options["nodelist"] = ",".join(cluster.hosts)
    short = {"-A": options.pop("account", None), "-p": options.pop("partition", None)}
    return (
        *(word for option, value in short.items() if value for word in (option, value)),
        *(f"--{option}={value}" for option, value in options.items()),
    )


STARTER_FILE = "starter_program.py"
WINDOWS_FILE = "token_windows_program.py"
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
    replaceable: Collection[str] = (),
    file_options: Collection[str] = (),
) -> Job:
    """Return the Job that starts `argv` once per device or node, with any launcher.

    `python` runs the starter and replaces `{python}` in `argv`. `folder` is the program's working
    folder (None for the run folder). With `writes_steps`, $PACELINE_STEPS is the folder of event
    lines. The cluster's own variables override `env`. `replaceable` and `file_options` are those of
    `with_extra_arguments`.
    """
    starter = (resources.files(__package__ or "") / STARTER_FILE).read_text(encoding="utf-8")
    cluster = spec.cluster
    mode = "node" if per == "node" else "rank"
    sizes = (str(cluster.nodes), str(cluster.devices_per_node), str(int(writes_steps)))
    return Job(
        name=name,
        python=python,
        program=(
            *(STARTER_FILE, mode, *sizes),
            *with_extra_arguments(spec, argv, replaceable=replaceable, file_options=file_options),
        ),
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
    """Return one of Paceline's programs in an engine's `package`, as a file of its Job."""
    return {name: (resources.files(package) / name).read_text(encoding="utf-8")}


def unknown_settings(spec: RunSpec, names: Sequence[str], *, no_arguments: str = "") -> list[str]:
    """Return a sentence for each engine setting that the run's engine does not know.

    `no_arguments` is the reason why its program has no arguments, if it has none.
    """
    allowed = (*names, *COMMON_SETTINGS)
    problems = [
        f"engine_settings.{name} is not a setting of engine {spec.engine}; allowed: "
        f"{', '.join(allowed)}"
        for name in spec.engine_settings
        if name not in allowed
    ]
    if no_arguments and spec.engine_settings.get("arguments") is not None:
        problems.append(f"{ARGUMENTS} is not supported: {no_arguments}; leave it out")
    return [*problems, *common_problems(spec)]


def windows_program() -> dict[str, str]:
    """Return `token_windows_program.py`, which reads training samples, as a file of a Job."""
    return program_file(__package__ or "", WINDOWS_FILE)


def data_settings(spec: RunSpec) -> dict[str, Any]:
    """Return the data settings for `token_windows_program.py`."""
    return spec.data.model_dump(mode="json", include={"source", "path", "token_dtype"})


SETUP_LOG = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH",
    "NCCL_DEBUG_FILE": NCCL_LOG_FILE,
}
"""Variables for a log of NCCL's set-up in the run folder. They cost nothing during the steps."""


def setup_log(spec: RunSpec) -> dict[str, str]:
    """Return the variables for a log of NCCL's set-up; empty if the user has chosen another log."""
    is_chosen = spec.cluster.runs_here and "NCCL_DEBUG" in os.environ
    is_used = spec.cluster.device != "cpu" and spec.world_size > 1
    return SETUP_LOG if is_used and not is_chosen and "NCCL_DEBUG" not in spec.cluster.env else {}


def _environment(spec: RunSpec, env: Mapping[str, str], folder: Path | None) -> dict[str, str]:
    variables = {"PYTHONUNBUFFERED": "1"}
    if spec.cluster.threads_per_device:
        variables["OMP_NUM_THREADS"] = str(spec.cluster.threads_per_device)
    variables |= setup_log(spec)
    if folder is not None:
        variables[WORKING_FOLDER] = str(folder)
    cluster = with_secrets(spec.cluster.env, os.environ)
    return {**variables, **env, **cluster, **extra_environment(spec)}
