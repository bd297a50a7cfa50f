"""Job of NVIDIA's NeMo 1 benchmark: `DTYPE= MODEL_SIZE= sbatch -A -p -N launch.sh`.

If the recipe's own launch.sh is set, it is submitted unchanged. Otherwise Paceline's launch.sh
starts the same program in the same image, with overrides for all of the run's settings.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.hardware import with_secrets
from paceline.core.job import RUN_FOLDER, BatchScript, Job
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.launch.extra_settings import extra_environment, with_extra_arguments
from paceline.engines.launch.programs import (
    needs_queue,
    requested_limit_s,
    site_options,
    unknown_settings,
)
from paceline.engines.nemo.overrides import (
    ACTIVATIONS,
    DATA_FOLDER,
    WITH_VARIABLE,
    launcher_overrides,
    overrides,
    staged_data,
)
from paceline.engines.support import (
    DEEPSEEK,
    NO_CHECKPOINTS,
    SHAPE_OPTIONS,
    WITHOUT_RAMP_UP,
    Support,
    no,
    only,
    refusals,
)
from paceline.files.home import home_path

SCRIPT, SETTINGS_FILE = "launch.sh", "nemo.json"
NO_ARGUMENTS = "the recipe's launch.sh takes variables (engine_settings.environment)"
LOGS = ("results/*/*/*/*/log-*.out",)
"""Output of the whole job, in the folder structure of the recipe's results."""
PROGRAM = "/opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py"
TRACE_VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL,P2P,NET"}


VERSION, IMAGE = "25.01", "nvidia+nemo+24.09.sqsh"
"""GSW_VERSION of the recipe, and the image that its setup.sh leaves in STAGE_PATH."""
TRACE_STEPS = 10
"""Number of steps that the recipe always trains during an NCCL trace."""
SIZES = {"8b": (32, 4096), "70b": (80, 8192), "405b": (126, 16384)}
"""Layers and hidden size of Llama 3.1 by MODEL_SIZE."""
PROFILE = {
    "profile_start_step": "RUN_CONF_PROFILE_START_STEP",
    "profile_stop_step": "RUN_CONF_PROFILE_STOP_STEP",
    "profile_ranks": "RUN_CONF_PROFILE_RANKS",
    "profile_gpu_metrics": "RUN_CONF_PROFILE_GPU_METRICS",
    "profile_cpu": "RUN_CONF_PROFILE_CPU",
}
"""Settings for use with `profile`, and the recipe's variables for them."""
SETTINGS = ("form", "stage_path", "script", "image", "dataset", "profile", "nccl_trace", *PROFILE)
RANKS = re.compile(r"[0-9]+(,[0-9]+)*")
SWITCHES = ("dataset", "profile", "nccl_trace", "profile_gpu_metrics", "profile_cpu")
STEPS = ("profile_start_step", "profile_stop_step")

_GPT = no("NeMo's GPT does not support it")
_DENSE = "engine nemo pre-trains dense decoders"
_NOT_SET = "it is not passed to NeMo"
OWN_SCRIPT: Support = {
    **NO_CHECKPOINTS,
    **WITHOUT_RAMP_UP,
    **SHAPE_OPTIONS,
    **DEEPSEEK,
    "model.kind": only("decoder", reason=_DENSE),
    "model.num_experts": no(_DENSE),
    "model.norm_position": only("pre", reason="fixed in NeMo's GPT"),
    "model.final_norm": only(True, reason="NeMo's GPT always has it"),
    "model.position_offset": _GPT,
    "model.embedding_norm": _GPT,
    "model.embedding_size": _GPT,
    "lora": no(_DENSE),
    "training.dtype": only("bf16", "fp8", reason="the published benchmark has no other"),
    "training.compile": no(_NOT_SET),
    "training.lr_schedule.kind": only("constant", "cosine"),
    "training.lr_schedule.unit": only("steps"),
    "layout.zero_stage": only(1, reason="NeMo's distributed Adam shards only the optimizer states"),
    "layout.dp_shard": no("NeMo shards the states over all replicas"),
    "layout.schedule": only("1f1b", "interleaved", reason="NeMo's pipelines run 1f1b"),
    "data.source": only(
        "synthetic",
        reason=_NOT_SET,
        remedy="use synthetic (NeMo's mock data), or engine_settings.dataset=true for the "
        "llama3.1-dataset in STAGE_PATH",
    ),
    "data.packing": only("packed", reason=_NOT_SET),
    "data.loss_mask": no(_NOT_SET),
    "data.split": no(_NOT_SET),
}
_NO_VARIABLE = "the recipe's launch.sh has no variable for it"
RECIPE_SCRIPT: Support = {
    **OWN_SCRIPT,
    "layout.micro_batch": only(1, reason=_NO_VARIABLE),
    "layout.recompute": only("none", reason=_NO_VARIABLE),
}


def unsupported(spec: RunSpec) -> list[str]:
    """Return what NeMo 1 and the published benchmark cannot do of `spec`, one sentence each."""
    script = launch_script(spec)
    return [
        *unknown_settings(spec, SETTINGS, no_arguments=NO_ARGUMENTS if script else ""),
        *needs_queue(spec),
        *refusals(spec, OWN_SCRIPT if script is None else RECIPE_SCRIPT),
        *_setting_problems(spec),
        *_model_problems(spec),
        *(_script_problems(spec, script.name) if script is not None else ()),
    ]


def _model_problems(spec: RunSpec) -> Iterator[str]:
    model, schedule = spec.model, spec.training.lr_schedule
    if isinstance(model, DecoderShape) and (model.activation, model.gated_ffn) not in ACTIVATIONS:
        gate = "with" if model.gated_ffn else "without"
        yield f"model.activation {model.activation} {gate} a gate is not supported by NeMo's GPT"
    if schedule.kind == "constant" and schedule.warmup:
        yield "training.lr_schedule.warmup is not passed to NeMo with a constant learning rate"


def _script_problems(spec: RunSpec, name: str) -> Iterator[str]:
    if model_size(spec) is None:
        yield f"the recipe's {name} trains only Llama 3.1 with {', '.join(SIZES)}"
    if spec.engine_settings.get("dataset") is not None:
        yield "engine_settings.dataset needs Paceline's launch.sh; remove script or dataset"


def _setting_problems(spec: RunSpec) -> Iterator[str]:
    if not spec.engine_settings.get("stage_path"):
        yield "engine_settings.stage_path is missing: set it to the image's folder (STAGE_PATH)"
    elif re.search("[:,]", path := str(stage_path(spec))):
        yield f"engine_settings.stage_path {path} must not contain `:` or `,` (container mounts)"
    settings = {name: value for name, value in spec.engine_settings.items() if value is not None}
    for name in SWITCHES:
        if not isinstance(settings.get(name, False), bool):
            yield f"engine_settings.{name} {settings[name]} must be true or false"
    for name in STEPS:
        step = settings.get(name, 0)
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            yield f"engine_settings.{name} {step} must be a whole number of at least 0"
    ranks = str(settings.get("profile_ranks", 0))
    if not RANKS.fullmatch(ranks):
        yield f"engine_settings.profile_ranks {ranks} must be a list of ranks such as 0,8"
    if settings.get("profile") and settings.get("nccl_trace"):
        yield "engine_settings.profile and nccl_trace exclude each other; use two runs"
    stray = [name for name in PROFILE if settings.get(name) is not None]
    if stray and not settings.get("profile"):
        yield f"engine_settings.{stray[0]} needs engine_settings.profile=true"
    if settings.get("nccl_trace") and spec.training.steps != TRACE_STEPS:
        yield (
            f"training.steps must be {TRACE_STEPS} with engine_settings.nccl_trace (--set "
            f"steps={TRACE_STEPS})"
        )


def missing(spec: RunSpec) -> str | None:
    """Return a problem if the image or launch.sh is missing."""
    place, script = image(spec), launch_script(spec)
    if place.startswith("/") and not Path(place).exists():
        return f"{place} does not exist; `enroot import` it, or set engine_settings.image"
    if script is not None and not script.is_file():
        return f"{script} does not exist; copy the recipe's launch.sh"
    return None


def job(spec: RunSpec, name: str) -> Job:
    """Return the Job that submits launch.sh with the recipe's variables."""
    script = launch_script(spec)
    files = {} if script else {SCRIPT: launch_text(spec)}
    options = (*site_options(spec.cluster, gpus=True), "-N", str(spec.cluster.nodes))
    return Job(
        name=name,
        python=spec.cluster.interpreter,
        program=(),
        env={
            **variables(spec),
            **with_secrets(spec.cluster.env, os.environ),
            **extra_environment(spec),
        },
        files={**files, SETTINGS_FILE: json.dumps(settings(spec), indent=2) + "\n"},
        nodes=spec.cluster.nodes,
        devices_per_node=spec.cluster.devices_per_node,
        timeout_s=requested_limit_s(spec) if script else spec.time_limit_s,
        cluster=spec.cluster,
        batch=BatchScript(
            script=f"./{script.name if script else SCRIPT}",
            folder=str(script.parent) if script else RUN_FOLDER,
            options=options,
        ),
        logs=LOGS,
    )


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return the variables of launch.sh and the overrides in the launcher's names."""
    return {"variables": variables(spec), "overrides": launcher_overrides(spec)}


def launch_text(spec: RunSpec) -> str:
    """Return Paceline's launch.sh; raise UserError for a model that NeMo's GPT does not cover."""
    if not isinstance(spec.model, DecoderShape):
        raise UserError("engine nemo", "trains decoders only", remedy="--set engine=native")
    words = with_extra_arguments(spec, overrides(spec, spec.model))
    hydra = " \\\n  ".join(map(_word, words))
    is_traced = spec.engine_settings.get("nccl_trace")
    exports = [
        f"export {name}={value}" for name, value in (TRACE_VARIABLES if is_traced else {}).items()
    ]
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
    """Return the nsys command in the recipe's form, or an empty string without a profile."""
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
    """Return one override as a word of bash."""
    return f'"{text}"' if text in WITH_VARIABLE else shlex.quote(text)


def stage_path(spec: RunSpec) -> Path:
    """Return STAGE_PATH: the folder of image, tokenizer and data."""
    text = str(spec.engine_settings.get("stage_path", ""))
    return home_path("engine_settings.stage_path", text).absolute()


def launch_script(spec: RunSpec) -> Path | None:
    """Return the path of a third-party launch.sh; None for Paceline's own."""
    script = spec.engine_settings.get("script")
    return home_path("engine_settings.script", str(script)).absolute() if script else None


def image(spec: RunSpec) -> str:
    """Return the container image: as set, else the cluster's, else the one in STAGE_PATH."""
    setting = spec.engine_settings.get("image") or spec.cluster.slurm.container_image
    return str(setting or stage_path(spec) / IMAGE)


def model_size(spec: RunSpec) -> str | None:
    """Return MODEL_SIZE of the recipe's model, or None if it is not a Llama 3.1."""
    sizes = (getattr(spec.model, "num_layers", 0), spec.model.hidden_size)
    return next((name for name, size in SIZES.items() if size == sizes), None)


def result_folder(spec: RunSpec) -> str:
    """Return the recipe's results/GSW_VERSION/DTYPE/MODEL_SIZE/JOB_TOTAL_GPUS folder."""
    version = f"{VERSION}-nccl-trace" if spec.engine_settings.get("nccl_trace") else VERSION
    size = model_size(spec) or spec.recipe
    return f"results/{version}/{spec.training.dtype}/{size}/{spec.world_size}"


def variables(spec: RunSpec) -> dict[str, str]:
    """Return the variables for launch.sh and its programs, by the recipe's names."""
    layout, training = spec.layout, spec.training
    return {
        "DTYPE": training.dtype,
        "MODEL_SIZE": model_size(spec) or spec.recipe,
        "STAGE_PATH": str(stage_path(spec)),
        "GSW_VERSION": VERSION,
        "JOB_TOTAL_GPUS": str(spec.world_size),
        "RUN_CONF_IMAGE": image(spec),
        "RUN_CONF_RESULT_DIR": f"{RUN_FOLDER}/{result_folder(spec)}",
        "TP": str(layout.tp),
        "PP": str(layout.pp),
        "VP": str(layout.vp) if layout.vp > 1 else "null",
        "CP": str(layout.cp),
        "GBS": str(training.global_batch),
        "MAX_STEPS": str(training.steps),
        "SEQ_LEN": str(training.seq_len),
        **dict(_switches(spec)),
    }


def _switches(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield the recipe's profiler switches that are set."""
    settings = spec.engine_settings
    if settings.get("profile"):
        yield "ENABLE_PROFILE", "true"
    if settings.get("nccl_trace"):
        yield "ENABLE_NCCL_TRACE", "true"
    for name, variable in PROFILE.items():
        value = settings.get(name)
        if value is not None:
            yield variable, str(value).lower() if isinstance(value, bool) else str(value)
