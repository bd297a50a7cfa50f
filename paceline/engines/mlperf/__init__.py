"""MLPerf Training: submissions started by their run.sub and config_*.sh, and the log format.

The job sources the config and submits run.sub. Nodes, layout and batch follow the config; a field
that the user sets and the config contradicts is refused.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.hardware import ENVIRONMENT_NAME, Cluster, with_secrets
from paceline.core.job import RUN_FOLDER, BatchScript, Job
from paceline.core.layout import MODEL_AXES
from paceline.core.run import RunSpec
from paceline.core.secrets import is_secret
from paceline.core.shape import num_parameters
from paceline.core.text import whole_number
from paceline.engines.launch.extra_settings import extra_environment
from paceline.engines.launch.programs import (
    needs_queue,
    requested_limit_s,
    site_options,
    unknown_settings,
)
from paceline.engines.mlperf.log_format import LOG_FORMAT as LOG_FORMAT
from paceline.engines.support import NATIVE_ONLY, TestedProgram, refusals
from paceline.files.home import home_path
from paceline.files.programs import run_program
from paceline.files.recipe import Recipe

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
        result = run_program(words, env={**shell, **preset}, folder=config.parent, limit_s=LIMIT_S)
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


SIZES = {
    "cluster.nodes": ("DGXNNODES",),
    "cluster.devices_per_node": ("DGXNGPU",),
    "layout.tp": ("TENSOR_MODEL_PARALLEL", "TP"),
    "layout.pp": ("PIPELINE_MODEL_PARALLEL", "PP"),
    "layout.cp": ("CONTEXT_PARALLEL", "CP"),
    "layout.vp": ("INTERLEAVED_PIPELINE", "VP"),
    "layout.micro_batch": ("MICRO_BATCH_SIZE", "MBS"),
}
"""Variables of a config by the field of the run that they set; the first one that is set counts."""
BATCH = "training.global_batch"


@dataclass(frozen=True)
class ConfigSize:
    """Size that a config sets, and the variables that set it as text."""

    value: int
    setting: str


def config_sizes(variables: Mapping[str, str], devices_per_node: int) -> dict[str, ConfigSize]:
    """Return the sizes that a config's variables set, by the field of the run.

    global batch = BATCHSIZE, else MINIBS * dp, dp = DGXNNODES DGXNGPU / (tp pp cp). Source:
    README_8b of NVIDIA's MLPerf Training 5.1 submission. `devices_per_node` is the cluster's, for a
    config without DGXNGPU. Raises UserError for a size that is not a
    whole number.
    """
    sizes: dict[str, ConfigSize] = {}
    for field, names in SIZES.items():
        if name := next((name for name in names if name in variables), None):
            text = variables[name] or "empty"
            sizes[field] = ConfigSize(_size(name, variables), f"{name} {text}")
    if variables.get("BATCHSIZE"):
        setting = f"BATCHSIZE {variables['BATCHSIZE']}"
        return {**sizes, BATCH: ConfigSize(_size("BATCHSIZE", variables), setting)}
    if "MINIBS" not in variables:
        return sizes
    value = {field: size.value for field, size in sizes.items()}
    devices = value["cluster.nodes"] * value.get("cluster.devices_per_node", devices_per_node)
    split = prod(value.get(f"layout.{axis}", 1) for axis in MODEL_AXES)
    per_replica = _size("MINIBS", variables)
    if devices % split:
        raise UserError(
            "DGXNNODES x DGXNGPU",
            f"is {devices:,}, which is not a multiple of the config's tp x pp x cp, {split:,}",
        )
    dp = devices // split
    setting = f"MINIBS {per_replica} on {dp} replicas ({per_replica * dp} per step)"
    return {**sizes, BATCH: ConfigSize(per_replica * dp, setting)}


def sizes_in_files(recipe: Recipe, cluster: Cluster) -> dict[str, int]:
    """Return the sizes that the config of a recipe's settings sets, by field.

    Empty if a mandatory setting is missing, which `unsupported` reports. Raises UserError for a
    config that cannot be sourced, or that is of another model.
    """
    if _missing_settings(recipe) or not cluster.capabilities.batch_scripts:
        return {}
    path, variables = config(recipe), _variables(recipe, cluster)
    if problem := _other_model(recipe, variables):
        raise UserError(str(path), problem, remedy="choose a config of this benchmark")
    try:
        sizes = config_sizes(variables, cluster.devices_per_node)
    except UserError as error:
        raise UserError(str(path), str(error)) from error
    return {field: size.value for field, size in sizes.items()}


def contradictions(spec: RunSpec, variables: Mapping[str, str]) -> list[str]:
    """Return the fields of the run that the config sets otherwise, one sentence each.

    Only fields that the user sets, and nodes that the cluster does not have, differ: all others
    follow the config.
    """
    sentences: list[str] = []
    for field, size in config_sizes(variables, spec.cluster.devices_per_node).items():
        part, _, name = field.partition(".")
        ours = getattr(getattr(spec, part), name)
        if size.value != ours:
            sentences.append(f"the config has {size.setting}, but the run has {field} {ours}")
    return sentences


def _other_model(run: Recipe | RunSpec, variables: Mapping[str, str]) -> str | None:
    """Return how the config shows that it trains another model; None if it does not."""
    model = run.model
    if model.kind != "decoder":
        return None
    # Submissions keep the configs of Llama 3.1 8B and 405B in one folder.
    size = variables.get("MODEL_SIZE", "").lower()
    billions = size.removesuffix("b")
    ours = num_parameters(model) / 1e9
    if (number := whole_number(billions)) is not None and abs(number - ours) > 0.1 * ours:
        return f"is for a model of {size} (MODEL_SIZE), but the recipe's has {ours:.0f}b"
    layers = variables.get("OVERWRITTEN_NUM_LAYERS")
    if layers and _size("OVERWRITTEN_NUM_LAYERS", variables) != model.num_layers:
        return f"has OVERWRITTEN_NUM_LAYERS {layers}, but the model has {model.num_layers} layers"
    return None


def _size(name: str, variables: Mapping[str, str]) -> int:
    """Return a size that a variable sets; 1 for a disabled one (`null`)."""
    text = variables[name].strip().strip("'\"").lower()
    if text in ("", "null", "none"):
        return 1
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UserError(name, f"{variables[name]!r} is not a whole number above 0")
    return int(text)


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
UNUSED_SLURM_SETTINGS = {
    "container_image": "run.sub starts engine_settings.container",
    "container_mounts": "run.sub has its own mounts",
    "cpus_per_task": "the #SBATCH lines of run.sub decide",
    "requeue": "a trial is started once",
    "time": "WALLTIME of the config decides",
}
"""Reason for each Slurm setting of a cluster that run.sub does not get."""
IMAGE_SUFFIXES = (".sqsh", ".sqfs", ".squashfs")
"""Suffixes of image files of Enroot."""
SUPPORT = {"": NATIVE_ONLY}
"""Supported fields; the config decides the rest."""
TESTED_PROGRAMS = (
    TestedProgram(
        "training_results_v5.1",
        "`run.sub` to a score, without their images",
    ),
)


def unsupported(spec: RunSpec) -> list[str]:
    """Return what the submission's own benchmark cannot do of `spec`, one sentence each.

    Includes contradictions between the config and fields that the user sets.
    """
    names = (*MANDATORY, *OPTIONAL)
    problems = [
        *unknown_settings(spec, names, no_arguments=NO_ARGUMENTS),
        *needs_queue(spec),
    ]
    problems += refusals(spec, SUPPORT[""])
    problems += _missing_settings(spec)
    if problems:
        return problems
    try:
        variables = _variables(spec, spec.cluster)
        return [
            *_environment_problems(spec),
            *filter(None, [_other_model(spec, variables)]),
            *contradictions(spec, variables),
        ]
    except UserError as error:
        return [str(error)]


def _missing_settings(run: Recipe | RunSpec) -> list[str]:
    mandatory = {**MANDATORY, **({"model": MODEL} if run.lora else {})}
    return [
        f"engine_settings.{name} is missing: {meaning}"
        for name, meaning in mandatory.items()
        if not run.engine_settings.get(name)
    ]


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
    variables = _variables(spec, spec.cluster)
    site = spec.cluster.slurm.model_copy(update={"time": None})
    cluster = spec.cluster.model_copy(update={"slurm": site})
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
            options=(*words, *site_options(cluster, gpus=False)),
        ),
        logs=LOGS,
    )


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return the config, its batch script and every variable of run.sub, without secrets."""
    variables = _variables(spec, spec.cluster)
    return {
        "config": str(config(spec)),
        "script": str(implementation(spec) / _script(spec)),
        "exported": sorted(preset_variables(spec, spec.cluster)),
        "variables": {
            name: value for name, value in sorted(variables.items()) if not is_secret(name, value)
        },
    }


def preset_variables(run: Recipe | RunSpec, cluster: Cluster) -> dict[str, str]:
    """Return the variables that the benchmark exports before sourcing the config, by workload."""
    return {**with_secrets(cluster.env, os.environ), **_own_variables(run)}


def _own_variables(run: Recipe | RunSpec) -> dict[str, str]:
    """Return the variables that follow from the run itself; all paths are absolute."""
    data = "DATAROOT" if run.model.kind == "mmdit" else "DATADIR"
    return {
        "CONT": _image(run),
        data: _path(run, "data"),
        **({"MODEL": _path(run, "model")} if run.lora else {}),
        "LOGDIR": f"{RUN_FOLDER}/{RESULTS_FOLDER}",
        "NEXP": str(run.engine_settings.get("nexp", 1)),
        "SEED": str(run.training.seed),
    }


def _path(run: Recipe | RunSpec, name: str) -> str:
    """Return a path of the settings as an absolute one, because sbatch changes the folder."""
    text = str(run.engine_settings.get(name) or "")
    return str(home_path(f"engine_settings.{name}", text).absolute()) if text else ""


def _image(run: Recipe | RunSpec) -> str:
    """Return the image: an absolute path, or the name in a registry as Pyxis reads it."""
    text = str(run.engine_settings.get("container") or "")
    is_file = text.startswith(("/", ".", "~")) or text.endswith(IMAGE_SUFFIXES)
    return _path(run, "container") if is_file or Path(text).exists() else text


def notes(spec: RunSpec) -> list[str]:
    """Return the settings of the cluster that do not reach run.sub, one sentence each."""
    try:
        final = _variables(spec, spec.cluster)
    except UserError:  # `unsupported` reports it
        return []
    run_variables, extra = _own_variables(spec), extra_environment(spec)
    sentences: list[str] = []
    for name, value in spec.cluster.env.items():
        if name in run_variables:
            sentences.append(f"{name} in the cluster's env has no effect: each run sets it itself")
        elif final.get(name) != value and name not in extra:
            sentences.append(
                f"{name} in the cluster's env has no effect: the config sets it again; set it "
                f"behind the config with engine_settings.environment"
            )
    settings = spec.cluster.slurm.model_dump(exclude_defaults=True)
    return [
        *sentences,
        *(
            f"slurm.{name} of the cluster has no effect: {why}"
            for name, why in UNUSED_SLURM_SETTINGS.items()
            if settings.get(name)
        ),
    ]


def config(run: Recipe | RunSpec) -> Path:
    """Return the config's absolute path; the implementation's folder is searched first."""
    name = home_path("engine_settings.config", str(run.engine_settings.get("config", "")))
    folder = _implementation_setting(run)
    candidate = folder / name if folder else name
    return (candidate if candidate.is_file() else name).absolute()


def implementation(spec: RunSpec) -> Path:
    """Return the folder of config and run.sub, in which sbatch is called."""
    folder = _implementation_setting(spec)
    return folder.absolute() if folder else config(spec).parent


def _implementation_setting(run: Recipe | RunSpec) -> Path | None:
    folder = run.engine_settings.get("implementation")
    return home_path("engine_settings.implementation", str(folder)) if folder else None


def _script(spec: RunSpec) -> str:
    return str(spec.engine_settings.get("script", SCRIPT))


def _variables(run: Recipe | RunSpec, cluster: Cluster) -> dict[str, str]:
    preset = preset_variables(run, cluster)
    return {**preset, **source_config(config(run), preset), **extra_environment(run)}


ENDS_AT_TARGET = True
COMMANDS = ("bash", "sbatch")
OUTSIDE = "Slurm with Pyxis, and the benchmark's image, run.sub, config_*.sh and data"
