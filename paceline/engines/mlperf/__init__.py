"""MLPerf Training: submissions started by their run.sub and config_*.sh, and the log format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.hardware import with_secrets
from paceline.core.job import RUN_FOLDER, BatchScript, Job
from paceline.core.run import RunSpec
from paceline.core.secrets import is_secret
from paceline.engines.launch.programs import (
    needs_queue,
    requested_limit_s,
    site_options,
    unknown_settings,
)
from paceline.engines.mlperf.configuration import contradictions, source_config
from paceline.engines.mlperf.log_format import LOG_FORMAT as LOG_FORMAT
from paceline.engines.support import NATIVE_ONLY, refusals
from paceline.files.home import home_path

SETTINGS_FILE = "mlperf.json"
RESULTS_FOLDER = "results"
"""Folder for LOGDIR, in the run folder."""
LOGS = (f"{RESULTS_FOLDER}/*_[0-9].log", f"{RESULTS_FOLDER}/*_[0-9][0-9].log")
"""Logs of run.sub, `<datestamp>_<trial>.log`; logs of its checks are in the same folder."""
SCRIPT = "run.sub"
MANDATORY = {
    "config": "config_*.sh of the system, such as config_GB300_18x4x1xtp1pp1cp2_8b.sh",
    "container": "image that run.sub starts (CONT)",
    "data": "data folder (DATADIR; DATAROOT for Flux)",
}
MODEL = "folder of the base weights (MODEL)"
OPTIONAL = ("implementation", "model", "nexp", "script")
"""Optional settings: folder of config and run.sub, MODEL, NEXP, another name of run.sub."""
SUPPORT = {"": NATIVE_ONLY}
"""Supported fields; the config decides the rest, and contradictions with the recipe are errors."""


def unsupported(spec: RunSpec) -> list[str]:
    """Return what the submission's own benchmark cannot do of `spec`, one sentence each.

    Includes contradictions between config and recipe.
    """
    problems = [*unknown_settings(spec, (*MANDATORY, *OPTIONAL)), *needs_queue(spec)]
    problems += refusals(spec, SUPPORT[""])
    mandatory = {**MANDATORY, **({"model": MODEL} if spec.lora else {})}
    problems += [
        f"engine_settings.{name} is missing: {meaning}"
        for name, meaning in mandatory.items()
        if not spec.engine_settings.get(name)
    ]
    if problems:
        return problems
    try:
        return contradictions(spec, _variables(spec))
    except UserError as error:
        return [str(error)]


def missing(spec: RunSpec) -> str | None:
    """Return a problem if the batch script is not in the config's folder."""
    script = implementation(spec) / _script(spec)
    if script.is_file():
        return None
    return f"{script} does not exist; copy it from the container to the config's folder"


def job(spec: RunSpec, name: str) -> Job:
    """Return the Job that submits run.sub with the config's variables and those of the benchmark.

    Raises UserError for a config that cannot be sourced.
    """
    variables = _variables(spec)
    words = ("-N", variables["DGXNNODES"], "-t", variables["WALLTIME"])
    return Job(
        name=name,
        python=spec.cluster.interpreter,
        program=(),
        env=variables,
        files={SETTINGS_FILE: json.dumps(settings(spec), indent=2) + "\n"},
        nodes=spec.cluster.nodes,
        devices_per_node=spec.cluster.devices_per_node,
        timeout_s=requested_limit_s(spec),
        cluster=spec.cluster,
        batch=BatchScript(
            script=_script(spec),
            folder=str(implementation(spec)),
            options=(*words, *site_options(spec.cluster, gpus=False)),
        ),
        logs=LOGS,
    )


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return the config, its batch script and every variable of run.sub, without secrets."""
    variables = _variables(spec)
    return {
        "config": str(config(spec)),
        "script": str(implementation(spec) / _script(spec)),
        "exported": sorted(preset_variables(spec)),
        "variables": {
            name: value for name, value in sorted(variables.items()) if not is_secret(name, value)
        },
    }


def preset_variables(spec: RunSpec) -> dict[str, str]:
    """Return the variables that the benchmark exports before sourcing the config, by workload."""
    settings = spec.engine_settings
    data = "DATAROOT" if spec.model.kind == "mmdit" else "DATADIR"
    return {
        **with_secrets(spec.cluster.env, os.environ),
        "CONT": str(settings.get("container", "")),
        data: str(settings.get("data", "")),
        **({"MODEL": str(settings.get("model", ""))} if spec.lora else {}),
        "LOGDIR": f"{RUN_FOLDER}/{RESULTS_FOLDER}",
        "NEXP": str(settings.get("nexp", 1)),
        "SEED": str(spec.training.seed),
    }


def config(spec: RunSpec) -> Path:
    """Return the config's absolute path; the implementation's folder is searched first."""
    name = home_path("engine_settings.config", str(spec.engine_settings.get("config", "")))
    folder = _implementation_setting(spec)
    candidate = folder / name if folder else name
    return (candidate if candidate.is_file() else name).absolute()


def implementation(spec: RunSpec) -> Path:
    """Return the folder of config and run.sub, in which sbatch is called."""
    folder = _implementation_setting(spec)
    return folder.absolute() if folder else config(spec).parent


def _implementation_setting(spec: RunSpec) -> Path | None:
    folder = spec.engine_settings.get("implementation")
    return home_path("engine_settings.implementation", str(folder)) if folder else None


def _script(spec: RunSpec) -> str:
    return str(spec.engine_settings.get("script", SCRIPT))


def _variables(spec: RunSpec) -> dict[str, str]:
    preset = preset_variables(spec)
    return {**preset, **source_config(config(spec), preset)}


ENDS_AT_TARGET = True
COMMANDS = ("bash", "sbatch")
OUTSIDE = "Slurm with Pyxis, and the benchmark's image, run.sub, config_*.sh and data"
