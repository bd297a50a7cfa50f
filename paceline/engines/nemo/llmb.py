"""NVIDIA's procedure of today as a Job: `llmb-run submit` in an installation of its recipes.

llmb-run itself renders the batch script and submits it; a script of ours calls it, links the
experiment's folder into the run folder and prints the job's number. Words and variables:
NVIDIA/exemplar-performance, cli/llmb-run/README.md and llama3.1/pretrain/megatron_bridge/launch.sh.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from typing import Any

from paceline.core.hardware import with_secrets
from paceline.core.job import BatchScript, Job
from paceline.core.run import RunSpec
from paceline.core.secrets import REDACTED, is_secret
from paceline.engines.launch.batch import asked_limit_s
from paceline.engines.nemo.installation import CONFIG_FILE, installation
from paceline.engines.nemo.llmb_refusals import (
    PROGRAM,
    install_folder,
    recipes_variables,
    refusals,
    size_of,
    workload_of,
)

SCRIPT, SETTINGS_FILE = "llmb.sh", "nemo.json"
LINK = "experiment"
LOGS = tuple(f"{LINK}/{pattern}" for pattern in ("log-*.out", "sbatch_*.out", "slurm-*.out"))
"""What NeMo-Run's job leaves in the experiment's folder, the training's own log first."""
SAID = "logs/llmb-run.log"
RUN_ONCE = {"SBATCH_NO_REQUEUE": "1"}
"""Else a job that loses a node is begun anew by Slurm, with a second log. `--slurm-arg` would do as
well, but llmb-run refuses it beside ADDITIONAL_SLURM_PARAMS, which some installations export."""


def unsupported(spec: RunSpec) -> list[str]:
    """What llmb-run cannot be asked for of `spec`, one sentence each."""
    return [*refusals(spec)]


def missing(spec: RunSpec) -> str | None:
    """The installation, the workload in it, or llmb-run, where it is not there."""
    folder, workload = install_folder(spec), workload_of(spec)
    file = folder / CONFIG_FILE
    if not file.is_file():
        return f"{file} is not there; engine_settings.llmb_install names LLMB_INSTALL"
    if workload not in installation(folder, workload).workloads:
        return f"{file} does not list {workload}; `llmb-install` installs it"
    if shutil.which(PROGRAM, path=f"{os.environ.get('PATH', '')}{os.pathsep}{folder}") is None:
        return f"{PROGRAM} is neither in PATH nor in {folder}; NVIDIA's install.sh installs it"
    return None


def job(spec: RunSpec, name: str) -> Job:
    """The Job whose script calls llmb-run."""
    return Job(
        name=name,
        python=spec.cluster.interpreter,
        program=(),
        env={
            **with_secrets(spec.cluster.env, os.environ),
            **recipes_variables(spec),
            **RUN_ONCE,
        },
        files={
            SCRIPT: script_text(spec),
            SETTINGS_FILE: json.dumps(settings(spec), indent=2) + "\n",
        },
        nodes=spec.cluster.nodes,
        devices_per_node=spec.cluster.devices_per_node,
        timeout_s=asked_limit_s(spec),
        cluster=spec.cluster,
        batch=BatchScript(script=f"./{SCRIPT}", submits=True),
        logs=LOGS,
    )


def settings(spec: RunSpec) -> dict[str, Any]:
    """The command, where it is called, and the variables that the recipe's launch.sh reads."""
    return {
        "folder": str(install_folder(spec)),
        "command": [*_command(spec)],
        "variables": recipes_variables(spec),
    }


def script_text(spec: RunSpec) -> str:
    """The script that calls llmb-run and prints the number of the job that it has submitted.

    Options of sbatch that it is given become options of llmb-run.
    """
    lines = [
        "#!/usr/bin/env bash",
        "set -euo pipefail",
        'folder=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)',
        f"said=$folder/{SAID}",
        f"cd -- {shlex.quote(str(install_folder(spec)))}",
        "PATH=$PATH:$PWD",
        f'{shlex.join(_command(spec))} "${{@/#--/--slurm-arg=}}" >"$said" 2>&1 || true',
        r"number=$(sed -n 's/.*jobid=\([0-9][0-9]*\).*/\1/p' " '"$said" | tail -n 1)',
        r"place=$(sed -n -e 's/^JobID: [^,]*, Workdir: //p' -e 's/.* workdir=//p' "
        '"$said" | tail -n 1)',
        'if [[ ! $number ]]; then tail -n 5 "$said" >&2; exit 1; fi',
        f'if [[ -d $place ]]; then ln -s -- "$place" "$folder/{LINK}"; fi',
        'echo "$number"',
    ]
    return "\n".join(lines) + "\n"


def _command(spec: RunSpec) -> Iterator[str]:
    """llmb-run and its words."""
    asked, site = spec.engine_settings, spec.cluster.slurm
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
    for name, value in {"constraint": site.constraint, "hint": site.hint, "qos": site.qos}.items():
        if value:
            yield f"--slurm-arg={name}={value}"
    for name, value in spec.cluster.env.items():
        if value != REDACTED and not is_secret(name, value):
            yield f"--env={name}={value}"
    yield from ("-p",) if asked.get("profile") else ()
    yield from ("--force",) if asked.get("force") else ()
    yield f"--mbridge-arg=--seq_length={spec.training.seq_len}"
    yield f"--mbridge-arg=--use_megatron_fsdp={str(spec.layout.zero_stage == 3).lower()}"
