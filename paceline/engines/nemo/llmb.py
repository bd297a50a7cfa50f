"""Job of NVIDIA's current benchmarks: `llmb-run submit` in an installation of its recipes.

llmb-run itself creates and submits the batch script. Paceline's script calls it, links the
experiment's folder into the run folder and prints the job number. Source of arguments and
variables: NVIDIA/exemplar-performance, cli/llmb-run/README.md and
llama3.1/pretrain/megatron_bridge/launch.sh.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from paceline.core.errors import UserError
from paceline.core.hardware import with_secrets
from paceline.core.job import BatchScript, Job
from paceline.core.run import RunSpec
from paceline.core.secrets import REDACTED, is_secret
from paceline.engines.launch.extra_settings import extra_environment, with_extra_arguments
from paceline.engines.launch.programs import needs_queue, requested_limit_s, unknown_settings
from paceline.engines.megatron_bridge import RECIPE, gpu_of, recipe_problems
from paceline.engines.megatron_bridge import notes as bridge_notes
from paceline.engines.nemo.launch import model_size
from paceline.engines.support import Support, only, refusals
from paceline.files.home import home_path
from paceline.files.yaml_file import plain, read_document

SCRIPT, SETTINGS_FILE = "llmb.sh", "nemo.json"
REPEATABLE = ("slurm-arg", "mbridge-arg", "env")
"""Options of llmb-run that may occur several times."""
LINK = "experiment"
LOGS = tuple(f"{LINK}/{pattern}" for pattern in ("log-*.out", "sbatch_*.out", "slurm-*.out"))
"""Files of NeMo-Run's job in the experiment's folder, the training's own log first."""
OUTPUT_FILE = "logs/llmb-run.log"
NO_REQUEUE = {"SBATCH_NO_REQUEUE": "1"}
"""Variable that keeps Slurm from requeueing a job that loses a node, with a second log.

`--slurm-arg` would also work, but llmb-run refuses it together with ADDITIONAL_SLURM_PARAMS, which
some installations export.
"""
PROGRAM = "llmb-run"
WORKLOAD = "pretrain_llama3.1"
SETTINGS = ("form", "llmb_install", "workload", "size", "variant", "profile", "force")
SWITCHES = ("profile", "force")
FP8_RECIPES = {"fp8": "cs", "mxfp8": "mx"}
GPUS_PER_NODE = {"gb200": 4, "gb300": 4}
"""Number of GPUs per node that llmb-run assumes; 8 for any other GPU."""
CONFIG_FILE, RELEASE_FILE = "cluster_config.yaml", "release.yaml"
PASSES_ARGUMENTS = (26, 8)
"""First release of the recipes (llmb-run 1.16) whose `submit` accepts --mbridge-arg."""
SEQ_LEN = 8192
"""Sequence length of the Llama 3.1 recipes."""
SUPPORT: Support = {**RECIPE, "training.dtype": only("bf16", *FP8_RECIPES, "nvfp4")}


def unsupported(spec: RunSpec) -> list[str]:
    """Return what llmb-run cannot do of `spec`, one sentence each."""
    return [
        *unknown_settings(spec, SETTINGS),
        *needs_queue(spec),
        *_setting_problems(spec),
        *recipe_problems(spec),
        *refusals(spec, SUPPORT),
        *_launch_script_problems(spec),
        *_installation_problems(spec),
    ]


def notes(spec: RunSpec) -> list[str]:
    """Return how layout and batch differ from NVIDIA's recipe of today."""
    return bridge_notes(spec)


def missing(spec: RunSpec) -> str | None:
    """Return a problem if the installation, its workload or llmb-run is missing."""
    folder, workload = install_folder(spec), workload_of(spec)
    file = folder / CONFIG_FILE
    if not file.is_file():
        return f"{file} does not exist; set engine_settings.llmb_install to LLMB_INSTALL"
    if workload not in installation(folder, workload).workloads:
        return f"{file} does not list {workload}; install it with `llmb-install`"
    if shutil.which(PROGRAM, path=f"{os.environ.get('PATH', '')}{os.pathsep}{folder}") is None:
        return f"{PROGRAM} is not in PATH or {folder}; install it with NVIDIA's install.sh"
    return None


def job(spec: RunSpec, name: str) -> Job:
    """Return the Job whose script calls llmb-run."""
    return Job(
        name=name,
        python=spec.cluster.interpreter,
        program=(),
        env={
            **with_secrets(spec.cluster.env, os.environ),
            **recipe_variables(spec),
            **NO_REQUEUE,
            **extra_environment(spec),
        },
        files={
            SCRIPT: script_text(spec),
            SETTINGS_FILE: json.dumps(settings(spec), indent=2) + "\n",
        },
        nodes=spec.cluster.nodes,
        devices_per_node=spec.cluster.devices_per_node,
        timeout_s=requested_limit_s(spec),
        cluster=spec.cluster,
        batch=BatchScript(script=f"./{SCRIPT}", submits=True),
        logs=LOGS,
    )


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return the command, its folder, and the variables of the recipe's launch.sh."""
    return {
        "folder": str(install_folder(spec)),
        "command": _command(spec),
        "variables": recipe_variables(spec),
    }


def script_text(spec: RunSpec) -> str:
    """Return the script that calls llmb-run and prints the number of the submitted job.

    The script passes sbatch options on as options of llmb-run.
    """
    lines = [
        "#!/usr/bin/env bash",
        "set -euo pipefail",
        'folder=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)',
        f"output=$folder/{OUTPUT_FILE}",
        f"cd -- {shlex.quote(str(install_folder(spec)))}",
        "PATH=$PATH:$PWD",
        f'{shlex.join(_command(spec))} "${{@/#--/--slurm-arg=}}" >"$output" 2>&1 || true',
        r"number=$(sed -n 's/.*jobid=\([0-9][0-9]*\).*/\1/p' " '"$output" | tail -n 1)',
        r"place=$(sed -n -e 's/^JobID: [^,]*, Workdir: //p' -e 's/.* workdir=//p' "
        '"$output" | tail -n 1)',
        'if [[ ! $number ]]; then tail -n 5 "$output" >&2; exit 1; fi',
        f'if [[ -d $place ]]; then ln -s -- "$place" "$folder/{LINK}"; fi',
        'echo "$number"',
    ]
    return "\n".join(lines) + "\n"


def _command(spec: RunSpec) -> list[str]:
    """Return llmb-run, its arguments and the extra ones."""
    return with_extra_arguments(spec, [*_own_command(spec)], repeatable=REPEATABLE)


def _own_command(spec: RunSpec) -> Iterator[str]:
    settings, site = spec.engine_settings, spec.cluster.slurm
    yield from (PROGRAM, "submit", "-w", workload_of(spec), "-s", size_of(spec) or "")
    yield from ("--dtype", "fp8" if spec.training.dtype == "mxfp8" else spec.training.dtype)
    yield from ("--scale", str(spec.world_size))
    flags = {
        "nodelist": ",".join(spec.cluster.hosts),
        "exclude": ",".join(site.exclude),
        "reservation": site.reservation,
        "segment": site.segment,
    }
    yield from (f"--{name}={value}" for name, value in flags.items() if value)
    options = site.options()
    for name in ("constraint", "hint", "mem", "qos", "time"):
        if value := options.get(name):
            yield f"--slurm-arg={name}={value}"
    for name, value in (spec.cluster.env | extra_environment(spec)).items():
        if value != REDACTED and not is_secret(name, value):
            yield f"--env={name}={value}"
    yield from ("-p",) if settings.get("profile") else ()
    yield from ("--force",) if settings.get("force") else ()
    release = installation(install_folder(spec), workload_of(spec)).release
    if release is None or release >= PASSES_ARGUMENTS:
        yield f"--mbridge-arg=--seq_length={spec.training.seq_len}"
        yield f"--mbridge-arg=--use_megatron_fsdp={str(spec.layout.zero_stage == 3).lower()}"


def install_folder(spec: RunSpec) -> Path:
    """Return LLMB_INSTALL."""
    text = str(spec.engine_settings.get("llmb_install", ""))
    return home_path("engine_settings.llmb_install", text).absolute()


def workload_of(spec: RunSpec) -> str:
    """Return llmb-run's name of the workload."""
    return str(spec.engine_settings.get("workload") or WORKLOAD)


def size_of(spec: RunSpec) -> str | None:
    """Return llmb-run's name of the model size: as set, else that of Llama 3.1."""
    return str(spec.engine_settings.get("size") or model_size(spec) or "") or None


def recipe_variables(spec: RunSpec) -> dict[str, str]:
    """Return layout, batch and length as variables of the recipe's launch.sh."""
    layout, training, variant = spec.layout, spec.training, spec.engine_settings.get("variant")
    limit_s = requested_limit_s(spec)
    return {
        "TP": str(layout.tp),
        "PP": str(layout.pp),
        "CP": str(layout.cp),
        "VP": str(layout.vp) if layout.vp > 1 else "None",
        **({"EP": str(layout.ep)} if layout.ep > 1 else {}),
        "MBS": str(layout.micro_batch),
        "GBS": str(training.global_batch),
        "MAX_STEPS": str(training.steps),
        **({"FP8_RECIPE": FP8_RECIPES[training.dtype]} if training.dtype in FP8_RECIPES else {}),
        **({"CONFIG_VARIANT": str(variant)} if variant else {}),
        **({"TIME_LIMIT": _clock(limit_s)} if limit_s else {}),
    }


def _clock(seconds: float) -> str:
    """Return HH:MM:SS, rounded up to whole minutes because Slurm counts minutes."""
    minutes = -(-timedelta(seconds=seconds) // timedelta(minutes=1))
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def _setting_problems(spec: RunSpec) -> Iterator[str]:
    settings = spec.engine_settings
    if not settings.get("llmb_install"):
        yield "engine_settings.llmb_install is missing: set it to LLMB_INSTALL"
    for name in SWITCHES:
        if not isinstance(settings.get(name, False), bool):
            yield f"engine_settings.{name} {settings[name]} must be true or false"
    for name, value in (spec.cluster.env | extra_environment(spec)).items():
        if not is_secret(name, value) and shlex.quote(value) != value:
            yield f"variable {name} contains a character that llmb-run does not accept in --env"
    gpu, cluster = gpu_of(spec), spec.cluster
    per_node = GPUS_PER_NODE.get(gpu or "", 8)
    if gpu is not None and cluster.nodes > 1 and cluster.devices_per_node != per_node:
        yield (
            f"devices_per_node {cluster.devices_per_node} must be {per_node}: llmb-run uses "
            f"{per_node} {gpu} per node"
        )
    if spec.model.kind == "decoder" and size_of(spec) is None:
        yield f"{spec.recipe} is not a Llama 3.1: set engine_settings.workload and size"


def _launch_script_problems(spec: RunSpec) -> Iterator[str]:
    """Yield what launch.sh of Llama 3.1 decides itself on B200 and B300 (release 26.08)."""
    if workload_of(spec) != WORKLOAD or gpu_of(spec) not in ("b200", "b300"):
        return
    size, training = size_of(spec), spec.training
    if size == "405b" and training.global_batch != (batch := 6 * spec.world_size):
        yield (
            f"training.global_batch {training.global_batch}: the recipe's launch.sh sets {batch} "
            f"for the 405B on {spec.world_size} GPUs; use --set global_batch={batch}"
        )
    if size == "70b" and training.dtype == "fp8" and spec.world_size >= 128:
        yield (
            "training.dtype fp8: the recipe's launch.sh trains the 70B in mxfp8 from 128 GPUs on; "
            "use --set dtype=mxfp8"
        )


def _installation_problems(spec: RunSpec) -> Iterator[str]:
    """Yield settings of the installation that override those of the run."""
    folder = install_folder(spec)
    if not spec.engine_settings.get("llmb_install") or not (folder / CONFIG_FILE).is_file():
        return
    try:
        config = installation(folder, workload_of(spec))
    except UserError as error:
        yield str(error)
        return
    yield from _contradictions(spec, folder, config)


def _contradictions(spec: RunSpec, folder: Path, config: Installation) -> Iterator[str]:
    site = spec.cluster.slurm
    for name, run_value, config_value in (
        ("device", gpu_of(spec), config.gpu_type),
        ("slurm.account", site.account, config.account),
        ("slurm.partition", site.partition, config.partition),
    ):
        if run_value and config_value and run_value != config_value:
            yield (
                f"cluster.{name} {run_value}: llmb-run uses {config_value}, as set in {CONFIG_FILE}"
            )
    if config.release is not None and config.release < PASSES_ARGUMENTS:
        release = ".".join(map("{:02}".format, config.release))
        settings = {
            "training.seq_len": workload_of(spec) != WORKLOAD or spec.training.seq_len != SEQ_LEN,
            "layout.zero_stage=3": spec.layout.zero_stage == 3,
        }
        for name, is_needed in settings.items():
            if is_needed:
                yield f"{name} needs recipes of 26.08 (llmb-run 1.16); {folder} has {release}"
    for name, value in recipe_variables(spec).items():
        if config.variables.get(name, value) != value:
            yield (
                f"{name}={value}: {CONFIG_FILE} exports {name}={config.variables[name]}, which "
                "overrides it; remove it there"
            )


@dataclass(frozen=True)
class Installation:
    """Settings of an llmb-run installation; None if its file does not contain them."""

    gpu_type: str | None
    workloads: tuple[str, ...]
    account: str | None
    partition: str | None
    variables: Mapping[str, str]
    """Variables that it exports for a workload, overriding the caller's."""
    release: tuple[int, ...] | None = None
    """Year and month of its recipes, such as (26, 8)."""


def installation(folder: Path, workload: str) -> Installation:
    """Return the settings of the installation in `folder`; raise UserError if unreadable.

    Keys: NVIDIA/exemplar-performance, cli/llmb-run/README.md, of schema 2 and before.
    """
    file = folder / CONFIG_FILE
    content: Any = plain(read_document(file)) if file.is_file() else {}
    slurm, workloads = _part(content, "slurm"), _part(content, "workloads")
    installed = cast(object, workloads.get("installed"))
    variables = {
        **_part(content, "environment"),
        **_part(workloads, "config", workload, "environment"),
    }
    gpu = content.get("gpu_type") or _part(content, "launcher").get("gpu_type")
    return Installation(
        gpu_type=str(gpu).lower() if gpu else None,
        workloads=tuple(map(str, cast(list[object], installed)))
        if isinstance(installed, list)
        else (),
        account=_option(slurm, "account"),
        partition=_option(slurm, "partition"),
        variables={name: str(value) for name, value in variables.items()},
        release=_release(content.get("llmb_repo") or _part(content, "launcher").get("llmb_repo")),
    )


def _release(repository: object) -> tuple[int, ...] | None:
    """Return year and month of `llmb_version` in the recipes' release.yaml; None if unknown."""
    file = Path(str(repository or "")) / RELEASE_FILE
    if not repository or not file.is_file():
        return None
    version = re.match(r"v?(\d+)\.(\d+)", str(plain(read_document(file)).get("llmb_version", "")))
    return (int(version[1]), int(version[2])) if version else None


def _option(slurm: dict[str, Any], name: str) -> str | None:
    """Return an option of GPU jobs, by any of the names that llmb-run accepts."""
    names = (name, f"SBATCH_{name.upper()}")
    places = [(_part(slurm, "gpu"), names), (slurm, (*names, f"gpu_{name}"))]
    return next((str(part[key]) for part, keys in places for key in keys if part.get(key)), None)


def _part(content: Any, *names: str) -> dict[str, Any]:
    """Return the mapping at that path in `content`, or an empty one."""
    for name in names:
        content = cast(dict[str, Any], content).get(name) if isinstance(content, dict) else None
    return cast(dict[str, Any], content) if isinstance(content, dict) else {}
