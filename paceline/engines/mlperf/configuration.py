"""Settings in config_*.sh of an MLPerf submission, and contradictions with the recipe."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.hardware import ENVIRONMENT_NAME
from paceline.core.run import RunSpec

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
