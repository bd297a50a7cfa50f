"""Job of NVIDIA's NeMo 1 benchmark: `DTYPE= MODEL_SIZE= sbatch -A -p -N launch.sh`.

The recipe's own launch.sh is submitted unchanged if it is in STAGE_PATH, where the recipe's
setup.sh copies it, or if it is set. Otherwise Paceline's launch.sh starts the same program in the
same image, with overrides for all of the run's settings. Sources: launch.sh, configure.sh, setup.sh
and llama3.1_*.yaml of NVIDIA/dgxc-benchmarking, llama3.1, tag v25.01.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.hardware import with_secrets
from paceline.core.job import RUN_FOLDER, BatchScript, Job
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.launch.extra_settings import (
    ENVIRONMENT,
    extra_environment,
    extra_words,
    with_extra_arguments,
)
from paceline.engines.launch.programs import (
    needs_queue,
    requested_limit_s,
    site_options,
    unknown_settings,
)
from paceline.engines.nemo.overrides import (
    ACTIVATIONS,
    DATA,
    DATA_FOLDER,
    TOKENIZER_MOUNT,
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
    unequal_stages,
)
from paceline.files.documents import read_text
from paceline.files.home import home_path

SCRIPT, SETTINGS_FILE = "launch.sh", "nemo.json"
NO_ARGUMENTS = "the recipe's launch.sh takes variables (engine_settings.environment)"
LOGS = ("results/*/*/*/*/log-*.out",)
"""Output of the whole job, in the folder structure of the recipe's results."""
PROGRAM = "/opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py"
DERIVED_VARIABLES = frozenset(
    {
        *("DTYPE", "MODEL_SIZE", "JOB_TOTAL_GPUS", "TP", "PP", "VP", "CP", "GBS", "MBS"),
        *("MAX_STEPS", "SEQ_LEN", "RUN_CONF_RESULT_DIR", "RUN_CONF_INDEX_DIR", "STAGE_PATH"),
    }
)
"""Variables of launch.sh that are derived from the run, whose figures depend on them."""
TRACE_VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL,P2P,NET"}


VERSION, IMAGE = "25.01", "nvidia+nemo+24.09.sqsh"
"""GSW_VERSION of the recipe, and the image that its setup.sh leaves in STAGE_PATH."""
TRACE_STEPS = 10
"""Number of steps that the recipe always trains during an NCCL trace."""
SIZES = {"8b": (32, 4096), "70b": (80, 8192), "405b": (126, 16384)}
"""Layers and hidden size of Llama 3.1 by MODEL_SIZE."""
QUERY_GROUPS = {"8b": 8, "70b": 8, "405b": 16}
"""`num_query_groups` of the recipe's configurations; the released 405B has 8 key/value heads."""
REDUCED_405B = {192: 42, 96: 21, 32: 7}
"""Layers of the 405B that configure.sh trains on these GPU counts, with its own pp and batch."""
MODEL = "llama3.1"
OWN = "own"
"""Value of `script` that selects Paceline's launch.sh."""
CONFIGURATION = "configure.sh"
PROFILED_RANKS = {"8b": range(8)}
"""Ranks that configure.sh profiles by MODEL_SIZE; the first 16 for any other."""
VARIABLES = {
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVTE_DP_AMAX_REDUCE_INTERVAL": "0",
    "NVTE_ASYNC_AMAX_REDUCTION": "1",
    "NVTE_APPLY_QK_LAYER_SCALING": "0",
    "NVTE_FLASH_ATTN": "0",
    "NVTE_FUSED_ATTN": "1",
    "NVTE_FWD_LAYERNORM_SM_MARGIN": "8",
    "NVTE_BWD_LAYERNORM_SM_MARGIN": "8",
    "NEMO_LOG_MEMORY_USAGE": "1",
}
"""Variables that configure.sh exports for speed and figures."""
PROFILE = {
    "profile_start_step": "RUN_CONF_PROFILE_START_STEP",
    "profile_stop_step": "RUN_CONF_PROFILE_STOP_STEP",
    "profile_ranks": "RUN_CONF_PROFILE_RANKS",
    "profile_gpu_metrics": "RUN_CONF_PROFILE_GPU_METRICS",
    "profile_cpu": "RUN_CONF_PROFILE_CPU",
}
"""Settings for use with `profile`, and the recipe's variables for them."""
SETTINGS = (
    *("form", "stage_path", "script", "image", "tokenizer", "dataset", "profile", "nccl_trace"),
    *PROFILE,
)
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
_USE_OWN = f"engine_settings.script={OWN} for Paceline's launch.sh"
RECIPE_SCRIPT: Support = {
    **OWN_SCRIPT,
    "layout.micro_batch": only(
        1, reason=_NO_VARIABLE, remedy=f"use layout.micro_batch=1, or {_USE_OWN}"
    ),
    "layout.recompute": only(
        "none", reason=_NO_VARIABLE, remedy=f"use layout.recompute=none, or {_USE_OWN}"
    ),
}


def unsupported(spec: RunSpec) -> list[str]:
    """Return what NeMo 1 and the published benchmark cannot do of `spec`, one sentence each."""
    script = launch_script(spec)
    return [
        *unknown_settings(spec, SETTINGS, no_arguments=NO_ARGUMENTS if script else ""),
        *needs_queue(spec),
        *refusals(spec, OWN_SCRIPT if script is None else RECIPE_SCRIPT),
        *unequal_stages(spec, "NeMo 1"),
        *_path_problems(spec, script),
        *_setting_problems(spec),
        *_model_problems(spec),
        *(_script_problems(spec, script) if script is not None else ()),
    ]


def notes(spec: RunSpec) -> list[str]:
    """Return what Paceline's launch.sh lacks compared with the published benchmark."""
    if launch_script(spec) is not None or model_size(spec) is None:
        return []
    data = "" if staged_data(spec) else ", and trains on mock data"
    return [
        "Paceline's launch.sh lacks the recipe's user-buffer overlap of tensor parallelism and its "
        f"deferred embedding gradients{data}; for speeds to compare with NVIDIA's table, put the "
        f"recipe's {SCRIPT}, {CONFIGURATION} and cfg in STAGE_PATH"
    ]


def _model_problems(spec: RunSpec) -> Iterator[str]:
    model, schedule = spec.model, spec.training.lr_schedule
    if isinstance(model, DecoderShape) and (model.activation, model.gated_ffn) not in ACTIVATIONS:
        gate = "with" if model.gated_ffn else "without"
        yield f"model.activation {model.activation} {gate} a gate is not supported by NeMo's GPT"
    if schedule.kind == "constant" and schedule.warmup:
        yield "training.lr_schedule.warmup is not passed to NeMo with a constant learning rate"


def _script_problems(spec: RunSpec, script: Path) -> Iterator[str]:
    """Yield what the recipe's launch.sh and configure.sh would do otherwise than requested."""
    name, size = script.name, model_size(spec)
    if size is None:
        yield f"the recipe's {name} trains only Llama 3.1 with {', '.join(SIZES)}"
        return
    groups = getattr(spec.model, "kv_heads", QUERY_GROUPS[size])
    if groups != QUERY_GROUPS[size]:
        yield (
            f"model.num_kv_heads {groups}: the recipe's {size} has {QUERY_GROUPS[size]}; use "
            f"--variant dgxc, or {_USE_OWN}"
        )
    if size == "405b" and (layers := REDUCED_405B.get(spec.world_size)):
        yield (
            f"the recipe's {CONFIGURATION} trains only {layers} of {spec.model.num_layers} layers "
            f"on {spec.world_size} GPUs; use a multiple of 576, or {_USE_OWN}"
        )
    dataset, trains_on_text = spec.engine_settings.get("dataset"), size != "405b"
    if dataset is not None and dataset != trains_on_text:
        data = "STAGE_PATH's data set" if trains_on_text else "synthetic data"
        yield f"the recipe's {name} trains {size} on {data}; remove dataset, or use {_USE_OWN}"
    if spec.engine_settings.get("tokenizer"):
        yield f"engine_settings.tokenizer has no effect on the recipe's {name}; use {_USE_OWN}"
    tasks = re.search(r"^#SBATCH --ntasks-per-node=(\d+)", _text(script), re.MULTILINE)
    if tasks and int(tasks[1]) != spec.cluster.devices_per_node:
        yield (
            f"devices_per_node {spec.cluster.devices_per_node} must be {tasks[1]}: {script} starts "
            f"{tasks[1]} tasks per node"
        )
    configuration = _text(stage_path(spec) / CONFIGURATION)
    for setting, variable in PROFILE.items():
        is_set = spec.engine_settings.get(setting) is not None
        if is_set and configuration and variable not in configuration:
            yield (
                f"engine_settings.{setting} has no effect, because {CONFIGURATION} does not read "
                f"{variable}; remove it, or use {_USE_OWN}"
            )


def _path_problems(spec: RunSpec, script: Path | None) -> Iterator[str]:
    settings = spec.engine_settings
    needs = {
        "for the recipe's launch.sh": script is not None,
        "as folder of the image, or set engine_settings.image": not _image_setting(spec),
        "as folder of the tokenizer, or set engine_settings.tokenizer": not settings.get(
            "tokenizer"
        ),
        "as folder of the data set": staged_data(spec),
    }
    reasons = [reason for reason, is_needed in needs.items() if is_needed]
    if not settings.get("stage_path") and reasons:
        yield f"engine_settings.stage_path is missing: set STAGE_PATH {reasons[0]}"
    for name, path in (("stage_path", stage_path(spec)), ("tokenizer", tokenizer(spec))):
        if settings.get(name) and re.search("[:,]", str(path)):
            yield f"engine_settings.{name} {path} must not contain `:` or `,` (container mounts)"


def _setting_problems(spec: RunSpec) -> Iterator[str]:
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
    names = {word.partition("=")[0] for word in extra_words(spec, "environment")}
    for name in sorted(names.intersection(DERIVED_VARIABLES)):
        yield f"{ENVIRONMENT}: {name} follows from the run; set its field of the recipe"
    if settings.get("nccl_trace") and spec.training.steps != TRACE_STEPS:
        yield (
            f"training.steps must be {TRACE_STEPS} with engine_settings.nccl_trace (--set "
            f"steps={TRACE_STEPS})"
        )


@dataclass(frozen=True)
class StagedPiece:
    """File that a run needs, and how to make it."""

    path: Path
    remedy: str


def staged_pieces(spec: RunSpec) -> list[StagedPiece]:
    """Return the files that a run needs; those of STAGE_PATH as the recipe's setup.sh makes them.

    The 405B needs no data: configure.sh sets mock data and the tokenizer of the image.
    """
    stage, script, size = stage_path(spec), launch_script(spec), model_size(spec)
    pieces: list[StagedPiece] = []
    if image(spec).startswith("/"):
        command = f"`enroot import --output {image(spec)} {_IMAGE}`"
        pieces.append(StagedPiece(Path(image(spec)), command))
    if script is not None:
        remedy = "copy it from llama3.1 of NVIDIA/dgxc-benchmarking, tag v25.01"
        files = (script, stage / CONFIGURATION, stage / "cfg" / f"{MODEL}_{size}.yaml")
        pieces += [StagedPiece(file, remedy) for file in files]
    if script is None or size != "405b":
        folder = tokenizer(spec)
        download = f"`huggingface-cli download {_TOKENIZER} --local-dir {folder}`"
        pieces.append(StagedPiece(folder / "tokenizer.json", download))
    if staged_data(spec) or (script is not None and size != "405b"):
        remedy = "submit the recipe's generate_dataset.sh, which downloads and tokenizes the Pile"
        names = [f"{name}.{ending}" for name in DATA for ending in ("bin", "idx")]
        pieces += [StagedPiece(stage / DATA_FOLDER / name, remedy) for name in names]
    return pieces


_IMAGE = "docker://nvcr.io#nvidia/nemo:24.09"
_TOKENIZER = (
    "meta-llama/Meta-Llama-3-8B config.json special_tokens_map.json tokenizer.json "
    "tokenizer_config.json generation_config.json"
)


def missing(spec: RunSpec) -> str | None:
    """Return the staged files that do not exist, each group with the command that makes it."""
    absent: dict[str, list[str]] = {}
    for piece in staged_pieces(spec):
        if not piece.path.exists():
            absent.setdefault(piece.remedy, []).append(str(piece.path))
    if not absent:
        return None
    staging = (
        f"; `paceline recipes stage {spec.recipe} --engine nemo` makes them all, for "
        "engine_settings.stage_path=staged:nemo-stage"
        if model_size(spec)
        else ""
    )
    return f"missing files{staging}; " + "; ".join(
        f"{', '.join(paths)} (to make: {remedy})" for remedy, paths in absent.items()
    )


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
    words = with_extra_arguments(spec, overrides(spec, spec.model, profiled_ranks(spec)))
    hydra = " \\\n  ".join(map(_word, words))
    is_traced = spec.engine_settings.get("nccl_trace")
    exports = [
        f"export {name}={value}" for name, value in (TRACE_VARIABLES if is_traced else {}).items()
    ]
    exports += [f"export {name}=${{{name}:-{value}}}" for name, value in VARIABLES.items()]
    log = f"$RESULT_DIR/log-nemo_{_label(spec)}${{MODEL_SIZE}}_${{JOB_TOTAL_GPUS}}_%j"
    data = f",$STAGE_PATH/{DATA_FOLDER}:/dataset" if staged_data(spec) else ""
    mounts = f"$RESULT_DIR,$INDEX_MAPPING_DIR,$TOKENIZER_PATH:{TOKENIZER_MOUNT}{data}"
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=paceline-nemo",
        "#SBATCH --exclusive",
        *(["#SBATCH --mem=0"] if spec.cluster.slurm.mem is None else []),
        f"#SBATCH --ntasks-per-node={spec.cluster.devices_per_node}",
        *([f"#SBATCH --time={ceil(limit_s / 60)}"] if (limit_s := spec.time_limit_s) else []),
        "set -eu -o pipefail",
        "export RESULT_DIR=$RUN_CONF_RESULT_DIR",
        "export INDEX_MAPPING_DIR=$RESULT_DIR/index_mapping",
        'mkdir -p "$RESULT_DIR/nsys" "$INDEX_MAPPING_DIR"',
        "export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}",
        "export HYDRA_FULL_ERROR=${HYDRA_FULL_ERROR:-1} PYTHONUNBUFFERED=1",
        "export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-False} TRANSFORMERS_OFFLINE=1",
        *exports,
        "export SLURM_MPI_TYPE=${SLURM_MPI_TYPE:-pmix}",
        f'srun --output="{log}.out" --error="{log}.err" \\',
        f'  --container-image="$RUN_CONF_IMAGE" --container-mounts="{mounts}" \\',
        "  --container-writable --no-container-mount-home \\",
        f"  {_profiler(spec)}python3 -u {PROGRAM} \\",
        f"  {hydra}",
    ]
    return "\n".join(lines) + "\n"


def _label(spec: RunSpec) -> str:
    """Return the model's name in the recipe's file names, which comes before MODEL_SIZE."""
    return f"{MODEL}_" if model_size(spec) else ""


def profiled_ranks(spec: RunSpec) -> str:
    """Return the profiled ranks: as set, else those of configure.sh that the run has."""
    ranks = spec.engine_settings.get("profile_ranks")
    usual = PROFILED_RANKS.get(model_size(spec) or "", range(16))
    return str(ranks) if ranks is not None else ",".join(map(str, usual[: spec.world_size]))


def _profiler(spec: RunSpec) -> str:
    """Return the nsys command in the recipe's form, or an empty string without a profile.

    GPU metrics are counted by the first task of a node only: two tasks cannot read the counters.
    """
    if not spec.engine_settings.get("profile"):
        return ""
    label = _label(spec).replace("_", "-") or "nemo-"
    file = (
        f"$RESULT_DIR/nsys/{label}${{MODEL_SIZE}}-${{DTYPE}}_${{JOB_TOTAL_GPUS}}g_${{SLURM_JOB_ID}}"
    )
    metrics = spec.engine_settings.get("profile_gpu_metrics")
    cpu = spec.engine_settings.get("profile_cpu")
    words = [
        f'nsys profile --output "{file}_%q{{SLURM_NODEID}}_%q{{SLURM_LOCALID}}"',
        "--nic-metrics=true --inherit-environment true --force-overwrite true",
        "--capture-range=cudaProfilerApi --capture-range-end=stop --stop-on-exit true",
        "--trace cuda,nvtx" + (",osrt" if cpu else ""),
        f"--sample {'cpu' if cpu else 'none'} --cpuctxsw none",
    ]
    if not metrics:
        return " ".join(words) + " \\\n  "
    first_task = (
        'metrics=; if [ "$SLURM_LOCALID" = 0 ]; then metrics=--gpu-metrics-device=all; fi; '
        f'exec {" ".join(words)} $metrics "$@"'
    )
    return f"bash -c {shlex.quote(first_task)} nsys \\\n  "


def _word(text: str) -> str:
    """Return one override as a word of bash."""
    return f'"{text}"' if text in WITH_VARIABLE else shlex.quote(text)


def stage_path(spec: RunSpec) -> Path:
    """Return STAGE_PATH: the folder of image, tokenizer and data."""
    text = str(spec.engine_settings.get("stage_path") or "")
    return home_path("engine_settings.stage_path", text).absolute()


def tokenizer(spec: RunSpec) -> Path:
    """Return the folder of the tokenizer: as set, else the recipe's in STAGE_PATH."""
    setting = spec.engine_settings.get("tokenizer")
    if not setting:
        return stage_path(spec) / DATA_FOLDER / "llama"
    return home_path("engine_settings.tokenizer", str(setting)).absolute()


def launch_script(spec: RunSpec) -> Path | None:
    """Return the recipe's launch.sh: as set, else the one in STAGE_PATH; None for Paceline's."""
    script = spec.engine_settings.get("script")
    if script == OWN:
        return None
    if script:
        return home_path("engine_settings.script", str(script)).absolute()
    path = stage_path(spec) / SCRIPT
    is_staged = bool(spec.engine_settings.get("stage_path")) and path.is_file()
    return path if is_staged and model_size(spec) else None


def _text(path: Path) -> str:
    """Return the text of a script; empty if it cannot be read."""
    try:
        return read_text(path, errors="replace")
    except OSError:
        return ""


def _image_setting(spec: RunSpec) -> str | None:
    setting = spec.engine_settings.get("image") or spec.cluster.slurm.container_image
    return str(setting) if setting else None


def image(spec: RunSpec) -> str:
    """Return the container image: as set, else the cluster's, else the one in STAGE_PATH."""
    return _image_setting(spec) or str(stage_path(spec) / IMAGE)


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
        **({"STAGE_PATH": str(stage_path(spec))} if spec.engine_settings.get("stage_path") else {}),
        "GSW_VERSION": VERSION,
        "JOB_TOTAL_GPUS": str(spec.world_size),
        "RUN_CONF_IMAGE": image(spec),
        # The index is not written to STAGE_PATH, which may be read-only or verified by checksums.
        **(
            {"RUN_CONF_INDEX_DIR": RUN_FOLDER}
            if launch_script(spec)
            else {"TOKENIZER_PATH": str(tokenizer(spec))}
        ),
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
