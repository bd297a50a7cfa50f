"""NVIDIA's published procedure for NeMo 1 as a Job: `DTYPE= MODEL_SIZE= sbatch -A -p -N launch.sh`.

The recipe's own launch.sh is submitted as it is. Where none is named, one of ours starts the same
program in the same image with overrides for everything that the run is.
"""

from __future__ import annotations

import json
import os
import shlex
from math import ceil
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.hardware import with_secrets
from paceline.core.job import RUN_FOLDER, BatchScript, Job
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.launch.batch import asked_limit_s, site_words
from paceline.engines.nemo.overrides import (
    DATA_FOLDER,
    WITH_A_VARIABLE,
    launcher_overrides,
    overrides,
)
from paceline.engines.nemo.procedure import (
    image,
    launch_script,
    staged_data,
    variables,
)
from paceline.engines.nemo.refusals import refusals

SCRIPT, SETTINGS_FILE = "launch.sh", "nemo.json"
LOGS = ("results/*/*/*/*/log-*.out",)
"""The whole job's output, in the structure of the recipe's results."""
PROGRAM = "/opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py"
TRACED = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL,P2P,NET"}


def unsupported(spec: RunSpec) -> list[str]:
    """What NeMo 1 and the published procedure cannot do of `spec`, one sentence each."""
    return [*refusals(spec)]


def missing(spec: RunSpec) -> str | None:
    """The image or launch.sh, where it is not there."""
    place, named = image(spec), launch_script(spec)
    if place.startswith("/") and not Path(place).exists():
        return f"{place} is not there; `enroot import` it, or name engine_settings.image"
    if named is not None and not named.is_file():
        return f"{named} is not there; copy the recipe's launch.sh"
    return None


def job(spec: RunSpec, name: str) -> Job:
    """The Job that submits launch.sh with the recipe's variables."""
    named = launch_script(spec)
    own = {} if named else {SCRIPT: launch_text(spec)}
    options = (*site_words(spec.cluster, gpus=True), "-N", str(spec.cluster.nodes))
    return Job(
        name=name,
        python=spec.cluster.interpreter,
        program=(),
        env={**variables(spec), **with_secrets(spec.cluster.env, os.environ)},
        files={**own, SETTINGS_FILE: json.dumps(settings(spec), indent=2) + "\n"},
        nodes=spec.cluster.nodes,
        devices_per_node=spec.cluster.devices_per_node,
        timeout_s=asked_limit_s(spec) if named else spec.time_limit_s,
        cluster=spec.cluster,
        batch=BatchScript(
            script=f"./{named.name if named else SCRIPT}",
            folder=str(named.parent) if named else RUN_FOLDER,
            options=options,
        ),
        logs=LOGS,
    )


def settings(spec: RunSpec) -> dict[str, Any]:
    """The variables of launch.sh and the overrides that the launcher's names spell."""
    return {"variables": variables(spec), "overrides": launcher_overrides(spec)}


def launch_text(spec: RunSpec) -> str:
    """launch.sh of our own; raises UserError for a model that is none of NeMo's GPT."""
    if not isinstance(spec.model, DecoderShape):
        raise UserError("engine nemo", "trains decoders alone", remedy="--set engine=native")
    hydra = " \\\n  ".join(map(_word, overrides(spec, spec.model)))
    traced = spec.engine_settings.get("nccl_trace")
    exports = [f"export {name}={value}" for name, value in (TRACED if traced else {}).items()]
    log = "$RESULT_DIR/log-nemo_${MODEL_SIZE}_${JOB_TOTAL_GPUS}_%j"
    data = f",$STAGE_PATH/{DATA_FOLDER}:/dataset" if staged_data(spec) else ""
    mounts = f"$RESULT_DIR,$INDEX_MAPPING_DIR{data}"
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=paceline-nemo",
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        f"#SBATCH --ntasks-per-node={spec.cluster.devices_per_node}",
        *([f"#SBATCH --time={ceil(limit_s / 60)}"] if (limit_s := spec.time_limit_s) else []),
        "set -eu -o pipefail",
        "export RESULT_DIR=$RUN_CONF_RESULT_DIR",
        "export INDEX_MAPPING_DIR=$RESULT_DIR/index_mapping",
        'mkdir -p "$RESULT_DIR/nsys" "$INDEX_MAPPING_DIR"',
        "export CUDA_DEVICE_MAX_CONNECTIONS=1 HYDRA_FULL_ERROR=1 PYTHONUNBUFFERED=1",
        "export TOKENIZERS_PARALLELISM=False TRANSFORMERS_OFFLINE=1",
        *exports,
        "export SLURM_MPI_TYPE=${SLURM_MPI_TYPE:-pmix}",
        f'srun --output="{log}.out" --error="{log}.err" \\',
        f'  --container-image="$RUN_CONF_IMAGE" --container-mounts="{mounts}" \\',
        "  --container-writable --no-container-mount-home \\",
        f"  {_profiler(spec)}python3 -u {PROGRAM} \\",
        f"  {hydra}",
    ]
    return "\n".join(lines) + "\n"


def _profiler(spec: RunSpec) -> str:
    """nsys before the program, as the recipe calls it, where a profile is asked for."""
    if not spec.engine_settings.get("profile"):
        return ""
    file = "$RESULT_DIR/nsys/nemo-${MODEL_SIZE}-${DTYPE}_${JOB_TOTAL_GPUS}g_${SLURM_JOB_ID}"
    metrics = spec.engine_settings.get("profile_gpu_metrics")
    cpu = spec.engine_settings.get("profile_cpu")
    words = [
        f'nsys profile --output "{file}_%q{{SLURM_NODEID}}_%q{{SLURM_LOCALID}}"',
        "--force-overwrite true --capture-range=cudaProfilerApi --capture-range-end=stop",
        "--trace cuda,nvtx" + (",osrt" if cpu else ""),
        f"--sample {'cpu' if cpu else 'none'} --cpuctxsw none",
        *(["--gpu-metrics-device=all"] if metrics else []),
    ]
    return " ".join(words) + " \\\n  "


def _word(text: str) -> str:
    """One override as a word of bash."""
    return f'"{text}"' if text in WITH_A_VARIABLE else shlex.quote(text)
