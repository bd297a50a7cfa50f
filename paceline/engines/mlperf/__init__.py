"""MLPerf Training: submissions started by their run.sub and config_*.sh, and the log format.

The job sources the config and submits run.sub. A config that contradicts the recipe is refused.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.hardware import ENVIRONMENT_NAME, with_secrets
from paceline.core.job import RUN_FOLDER, BatchScript, Job
from paceline.core.run import RunSpec
from paceline.core.secrets import is_secret
from paceline.engines.launch.extra_settings import extra_environment
from paceline.engines.launch.programs import (
    needs_queue,
    requested_limit_s,
    site_options,
    unknown_settings,
)
from paceline.engines.mlperf.log_format import LOG_FORMAT as LOG_FORMAT
from paceline.engines.support import NATIVE_ONLY, refusals
from paceline.files.home import home_path

SOURCE = 'set -a; source "$0" >&2; set +a; exec env -0'
LIMIT_S = 60.0
SHELL_VARIABLES = ("HOME", "OLDPWD", "PATH", "PWD", "SHLVL", "_")
"""Variables that the clean shell itself sets."""
SOURCE_ERROR = re.compile(r": line \d+: .*: (No such file or directory|Permission denied)$")
"""Bash's error for a file that it could not source; other programs' errors have no line number."""
REQUIRED_VARIABLES = ("DGXNNODES", "WALLTIME")
"""Variables required by the benchmark's `sbatch -N $DGXNNODES -t $WALLTIME run.sub`."""
RUN_VARIABLES = ("LOGDIR", "NEXP", "SEED")
"""Variables that each run sets: its log folder, number of trials and seed."""


def source_config(config: Path, preset: Mapping[str, str]) -> dict[str, str]:
    """Return the variables after `source config` in a shell with only those `exported`.

    Raises UserError if a file or one that it sources is missing, on an error, without nodes or time
    limit, and if the config changes a variable that the run sets.
    """
    if not config.is_file():
        raise UserError(
            "engine_settings.config", f"{config} is not a file", remedy="set it to a config_*.sh"
        )
    words = ["bash", "--noprofile", "--norc", "-c", SOURCE, str(config)]
    shell = {"HOME": str(Path.home()), "PATH": os.environ.get("PATH", os.defpath)}
    try:
        result = subprocess.run(
            words,
            env={**shell, **preset},
            cwd=config.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(str(config), f"took longer than {LIMIT_S:.0f} s to source") from error
    variables = dict(sorted(_pairs(result.stdout)))
    if problem := _problem(result, variables):
        raise UserError(str(config), problem, remedy="copy the files that it sources, too")
    overrides = [
        name for name in RUN_VARIABLES if name in preset and variables.get(name) != preset[name]
    ]
    if overrides:
        raise UserError(
            str(config),
            f"sets {' and '.join(overrides)}, which each run sets itself",
            remedy="remove the line from the config",
        )
    return variables


def _problem(result: subprocess.CompletedProcess[str], variables: Mapping[str, str]) -> str | None:
    """Return why the config's variables are unreliable, in bash's own words if available."""
    source_errors = [
        line.strip() for line in result.stderr.splitlines() if SOURCE_ERROR.search(line)
    ]
    missing = [name for name in REQUIRED_VARIABLES if not variables.get(name)]
    if not (result.returncode or source_errors or missing):
        return None
    errors = source_errors or result.stderr.strip().splitlines()
    why = f": {errors[0][:300]}" if errors else ""
    if not variables or not missing:
        return f"cannot be sourced{why}"
    return f"does not set {' and '.join(missing)}{why}"


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for entry in text.split("\0"):
        name, _, value = entry.partition("=")
        if ENVIRONMENT_NAME.fullmatch(name) and name not in SHELL_VARIABLES:
            yield name, value


def contradictions(spec: RunSpec, variables: Mapping[str, str]) -> list[str]:
    """Return contradictions between config and recipe, one sentence each.

    Results follow from the recipe, so a training of other sizes must not use its name. If the
    config does not set a variable, the recipe's value applies.
    """
    layout, cluster = spec.layout, spec.cluster
    sizes: list[tuple[tuple[str, ...], str, int]] = [
        (("DGXNNODES",), "--nodes", cluster.nodes),
        (("DGXNGPU",), "devices_per_node of the cluster", cluster.devices_per_node),
        (("TENSOR_MODEL_PARALLEL", "TP"), "layout.tp", layout.tp),
        (("PIPELINE_MODEL_PARALLEL", "PP"), "layout.pp", layout.pp),
        (("CONTEXT_PARALLEL", "CP"), "layout.cp", layout.cp),
        (("INTERLEAVED_PIPELINE", "VP"), "layout.vp", layout.vp),
        (("MICRO_BATCH_SIZE", "MBS"), "layout.micro_batch", layout.micro_batch),
    ]
    if spec.model.kind == "decoder":
        sizes.append((("OVERWRITTEN_NUM_LAYERS",), "model.num_layers", spec.model.num_layers))
    sentences: list[str] = []
    for names, field, ours in sizes:
        name = next((name for name in names if name in variables), None)
        if name is not None and (theirs := _number(variables[name])) != ours:
            text = variables[name] or "nothing"
            sentences.append(_sentence(f"{name} {text}", field, ours, theirs))
    return sentences + _batch_contradictions(spec, variables)


def _batch_contradictions(spec: RunSpec, variables: Mapping[str, str]) -> list[str]:
    """Return contradictions of the global batch size.

    global batch = BATCHSIZE, else MINIBS * dp, dp = devices / (tp pp cp) of the recipe. Source:
    README_8b of NVIDIA's MLPerf Training 5.1 submission.
    """
    ours = spec.training.global_batch
    if "BATCHSIZE" in variables:
        theirs = _number(variables["BATCHSIZE"])
        setting = f"BATCHSIZE {variables['BATCHSIZE']}"
    elif per_replica := _number(variables.get("MINIBS", "0")):
        theirs = per_replica * spec.dp
        setting = f"MINIBS {per_replica} on {spec.dp} replicas ({theirs} per step)"
    else:
        return []
    return [] if theirs == ours else [_sentence(setting, "training.global_batch", ours, theirs)]


def _sentence(setting: str, field: str, ours: int, theirs: int | None) -> str:
    able = "." in field and theirs is not None
    remedy = f" (--set {field}={theirs})" if able else ""
    return f"the config has {setting}, but the recipe has {field} {ours}{remedy}"


def _number(text: str) -> int | None:
    """Return a whole number, 1 for a disabled size (`null`), None for anything else."""
    text = text.strip().strip("'\"").lower()
    if text in ("", "null", "none"):
        return 1
    return int(text) if text.isdigit() else None


SETTINGS_FILE = "mlperf.json"
RESULTS_FOLDER = "results"
"""Folder for LOGDIR, in the run folder."""
LOGS = (f"{RESULTS_FOLDER}/*_[0-9].log", f"{RESULTS_FOLDER}/*_[0-9][0-9].log")
"""Logs of run.sub, `<datestamp>_<trial>.log`; logs of its checks are in the same folder."""
SCRIPT = "run.sub"
NO_ARGUMENTS = "run.sub takes variables (engine_settings.environment)"
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
    names = (*MANDATORY, *OPTIONAL)
    problems = [
        *unknown_settings(spec, names, no_arguments=NO_ARGUMENTS),
        *needs_queue(spec),
    ]
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
        return [
            *_environment_problems(spec),
            *contradictions(spec, _variables(spec)),
        ]
    except UserError as error:
        return [str(error)]


def _environment_problems(spec: RunSpec) -> list[str]:
    return [
        f"engine_settings.environment: {name} is set by each run; leave it out"
        for name in RUN_VARIABLES
        if name in extra_environment(spec)
    ]


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
    return {**preset, **source_config(config(spec), preset), **extra_environment(spec)}


ENDS_AT_TARGET = True
COMMANDS = ("bash", "sbatch")
OUTSIDE = "Slurm with Pyxis, and the benchmark's image, run.sub, config_*.sh and data"
