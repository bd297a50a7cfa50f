"""Native trainer as an engine: job creation, and event lines as the log format."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from typing import Any

from paceline.core.hardware import NATIVE_NARROW, with_secrets
from paceline.core.job import Job
from paceline.core.layout_checks import native_problems
from paceline.core.recompute import block_levels
from paceline.core.run import RunSpec
from paceline.core.shape import (
    ATTENTION_INPUTS,
    FFN,
    DecoderShape,
    trainable_parameters,
)
from paceline.core.training import DEFAULT_FP8_RECIPE, Training, expert_weights
from paceline.engines.launch.extra_settings import extra_environment
from paceline.engines.launch.programs import setup_log, unknown_settings
from paceline.engines.log_reading import native_lines, native_log
from paceline.engines.log_reading.log_content import LogFormat
from paceline.engines.support import (
    TEXT_SOURCES,
    TestedProgram,
    only,
    refusals,
    small_vocabulary,
)
from paceline.files.home import cache_folder
from paceline.files.trainer_program import PROGRAM_FOLDER, program_files

__all__ = [
    "LOG_FORMAT",
    "SUPPORT",
    "emulation_warnings",
    "job",
    "missing",
    "settings",
    "unsupported",
]

IMPORTS = ("torch",)
SETTINGS_FILE = "trainer.json"
NO_ARGUMENTS = "the native trainer reads the recipe's fields"
DTYPES = ("fp32", "bf16", "fp16", *NATIVE_NARROW)
GROUPED_RECIPES = ("rowwise", "mxfp8")
"""Recipes of low precision in which torchao has grouped GEMMs, which experts need."""
EMULATED_DTYPES = ("fp16",)
"""Data types that PyTorch emulates on a CPU."""
TOKEN_FILES = ("tokens", "indexed")
DOCUMENT_SOURCES = (*TEXT_SOURCES, "indexed")
LATENT_FILES = ("latents", "webdataset")
LATENT_SOURCES = ("synthetic", *LATENT_FILES)
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Variable for the cache of compiled graphs of all ranks and runs; Inductor locks its files."""
SUPPORT = {
    "": {
        "training.dtype": only(*DTYPES),
    }
}
TESTED_PROGRAMS = (TestedProgram("built-in trainer", "all layouts, SSH, Slurm", "one H100"),)


def unsupported(spec: RunSpec) -> list[str]:
    """Return what this trainer cannot do of `spec`, one sentence each."""
    problems = [*unknown_settings(spec, (), no_arguments=NO_ARGUMENTS), *_layout_problems(spec)]
    problems += refusals(spec, SUPPORT[""])
    dtype, fp8_recipe = spec.training.dtype, spec.training.fp8_recipe
    if dtype in NATIVE_NARROW and spec.cluster.device == "cpu":
        problems.append(f"training.dtype {dtype} needs a GPU: use bf16 or fp32 on a CPU")
    if dtype != "fp8" and fp8_recipe != DEFAULT_FP8_RECIPE:
        problems.append(f"training.fp8_recipe {fp8_recipe} is for training.dtype=fp8, not {dtype}")
    if spec.memory_limit_bytes is not None and spec.cluster.device != "cpu":
        problems.append("memory_limit_bytes limits processes on a CPU only; leave it out on GPUs")
    problems += [
        *_evaluation_problems(spec),
        *_document_problems(spec),
        *_expert_problems(spec),
        *_latent_attention_problems(spec),
        *_mtp_problems(spec),
    ]
    return problems + (
        _latent_problems(spec) if spec.model.kind == "mmdit" else _text_problems(spec, spec.model)
    )


def emulation_warnings(spec: RunSpec) -> list[str]:
    """Return a warning if this trainer trains `spec` many times slower than other programs."""
    dtype = spec.training.dtype
    if spec.engine != "native" or spec.cluster.device != "cpu" or dtype not in EMULATED_DTYPES:
        return []
    return [f"{dtype} is emulated on a CPU and many times slower than bf16 or fp32"]


def _evaluation_problems(spec: RunSpec) -> list[str]:
    """Return contradictions in the evaluation and logging of the run."""
    problems: list[str] = []
    evaluation = spec.training.evaluation
    if evaluation and evaluation.path and not (spec.data.path or spec.data.blend):
        problems.append(
            f"training.evaluation.path needs data in files, but data.source is {spec.data.source}"
        )
    masks = {
        "data": spec.data.loss_mask,
        "training.evaluation": evaluation and evaluation.loss_mask,
    }
    if spec.data.source not in TOKEN_FILES and (
        where := [name for name, mask in masks.items() if mask]
    ):
        problems.append(
            f"{where[0]}.loss_mask needs a token file, but data.source is {spec.data.source}"
        )
    if evaluation and evaluation.mean == "samples" and spec.model.kind == "mmdit":
        problems.append(
            "training.evaluation.mean samples is not supported for mmdit: its loss is a mean over "
            "timesteps"
        )
    if evaluation and not evaluation.path and spec.data.blend:
        problems.append("training.evaluation.path is missing: data.blend needs an evaluation file")
    if spec.data.blend and (spec.data.loss_mask or spec.data.packing == "padded"):
        problems.append("data.blend supports only packed samples without a mask; use data.path")
    if spec.mlperf and spec.checkpoint.resume:
        problems.append("checkpoint.resume is not allowed in a timed MLPerf run; leave it out")
    return problems


def _document_problems(spec: RunSpec) -> list[str]:
    """Return why documents cannot be masked from each other."""
    data = spec.data
    if not data.document_mask:
        return []
    if data.source not in DOCUMENT_SOURCES or spec.model.kind == "mmdit":
        allowed = ", ".join(DOCUMENT_SOURCES)
        return [
            f"data.document_mask needs document boundaries, which data.source {data.source} does "
            f"not have: use a decoder on {allowed}"
        ]
    if data.packing == "padded":
        return ["data.document_mask is for packed samples: a padded sample is one document"]
    return []


def _expert_problems(spec: RunSpec) -> list[str]:
    """Return why a model with experts cannot be trained so."""
    model, problems = spec.model, list[str]()
    if model.kind == "mmdit" or model.num_experts == 1:
        fields = ("routing", "router_aux_loss", "router_z_loss", "router_bias_update_rate")
        return [
            f"training.{name} is for models with experts, and this one has none; leave it out"
            for name in fields
            if getattr(spec.training, name) != type(spec.training).model_fields[name].default
        ]
    dtype, recipe = spec.training.dtype, spec.training.fp8_recipe
    if dtype in NATIVE_NARROW and (recipe if dtype == "fp8" else dtype) not in GROUPED_RECIPES:
        setting = f"training.fp8_recipe {recipe}" if dtype == "fp8" else f"training.dtype {dtype}"
        problems.append(
            f"{setting} is not supported for experts, because torchao has no grouped GEMMs of it; "
            "use fp8_recipe=rowwise with dtype=fp8, dtype=mxfp8, or dtype=bf16"
        )
    default = Training.model_fields["router_bias_update_rate"].default
    if not model.router_choice_bias and spec.training.router_bias_update_rate != default:
        problems.append(
            "training.router_bias_update_rate is for model.router_choice_bias=true; set that, or "
            "leave it out"
        )
    if model.bias and (model.shared_ffn_size or model.first_dense_layers):
        problems.append(
            "model.bias is not supported with shared experts or first dense layers: no known model "
            "has both; use model.bias=false"
        )
    targets = sorted(FFN.intersection(spec.lora.targets)) if spec.lora else []
    if targets:
        problems.append(
            f"lora.targets {', '.join(targets)} are stacked weights of experts, which have no "
            "adapters; use targets of attention: q, k, v, o"
        )
    return problems


def _latent_attention_problems(spec: RunSpec) -> list[str]:
    """Return why a model with latent attention cannot be trained so."""
    model, problems = spec.model, list[str]()
    latent = model.latent_attention if model.kind == "decoder" else None
    if latent is None:
        return []
    if spec.training.dtype in NATIVE_NARROW:
        problems.append(
            f"training.dtype {spec.training.dtype} is not supported for latent attention; use bf16"
        )
    if latent.v_head_dim > latent.qk_head_dim:
        problems.append(
            f"model.latent_attention.v_head_dim {latent.v_head_dim} is not supported: values are "
            f"at most as wide as queries, {latent.qk_head_dim}"
        )
    targets = sorted(ATTENTION_INPUTS.intersection(spec.lora.targets)) if spec.lora else []
    if targets:
        problems.append(
            f"lora.targets {', '.join(targets)} are not layers of latent attention; use o or "
            "targets of the MLP"
        )
    return problems


def _mtp_problems(spec: RunSpec) -> list[str]:
    """Return why a model with multi-token prediction layers cannot be trained so."""
    model, layout = spec.model, spec.layout
    if model.kind == "mmdit" or not model.mtp_layers:
        default = Training.model_fields["mtp_loss_weight"].default
        unused = "training.mtp_loss_weight is for models with mtp_layers; leave it out"
        return [unused] * (spec.training.mtp_loss_weight != default)
    reasons = {
        f"layout.pp {layout.pp} with a projected or normed embedding": (
            layout.pp > 1 and (model.embed_dim != model.hidden_size or model.embedding_norm),
            "the last stage has a copy of the table alone",
        ),
        f"layout.schedule zero-bubble (mtp_layers {model.mtp_layers})": (
            layout.schedule == "zero-bubble" and model.mtp_layers > 1,
            "PyTorch cannot delay the gradient of the embedding that they share",
        ),
        "lora": (spec.lora is not None, "adapters are of the other layers"),
        "model.positions learned": (model.positions != "rope", "embeddings would have positions"),
        "training.mtp_loss_weight 0": (spec.training.mtp_loss_weight == 0, "nothing would train"),
    }
    return [
        f"{what} is not supported with model.mtp_layers: {why}; leave it out or set "
        "model.mtp_layers=0"
        for what, (applies, why) in reasons.items()
        if applies
    ]


def _latent_problems(spec: RunSpec) -> list[str]:
    """Return why a diffusion transformer cannot be trained on the data."""
    if spec.data.split is not None and spec.data.source in LATENT_FILES:
        return [f"data.split needs text samples, but data.source is {spec.data.source}"]
    if spec.data.source in LATENT_SOURCES:
        return []
    allowed = ", ".join(LATENT_SOURCES)
    return [f"data.source {spec.data.source} has no latents: use {allowed} for mmdit"]


def _text_problems(spec: RunSpec, model: DecoderShape) -> list[str]:
    """Return why a decoder cannot be trained on the data."""
    problems: list[str] = []
    if spec.data.source in LATENT_FILES:
        problems.append(
            f"data.source {spec.data.source} has no tokens: use another source for a decoder"
        )
    if model.positions == "learned" and spec.training.seq_len > model.max_positions:
        problems.append(
            f"training.seq_len {spec.training.seq_len} exceeds the {model.max_positions} learned "
            "positions"
        )
    problems += small_vocabulary(spec)
    if spec.data.source == "tokens" and spec.data.packing == "padded":
        problems.append(
            "data.packing padded needs records, which a token file does not have: use jsonl"
        )
    return problems


def _layout_problems(spec: RunSpec) -> list[str]:
    """Return problems of the full batch, else of the first smaller one of a ramp-up."""
    for batch in reversed(spec.training.batches):
        problems = native_problems(replace(spec.parallel, global_batch=batch))
        if problems and batch < spec.training.global_batch:
            return [f"while the batch ramps up: {problem}" for problem in problems]
        if problems:
            return problems
    return []


def missing(spec: RunSpec) -> str | None:
    """Return a problem if torch or torchao is missing, unless another interpreter is set."""
    if spec.cluster.python is not None or spec.cluster.in_container:
        return None
    packages = (
        {"torch": "native", "torchao": "fp8"}
        if spec.training.dtype in NATIVE_NARROW
        else {"torch": "native"}
    )
    for package, extra in packages.items():
        if importlib.util.find_spec(package) is None:
            elsewhere = ", or set `python` in the cluster file to another interpreter"
            remedy = f"pip install 'paceline[{extra}]'{elsewhere if spec.cluster.nodes > 1 else ''}"
            return f"{package} is not installed; {remedy}"
    return None


def job(spec: RunSpec, name: str) -> Job:
    """Return the Job that trains `spec`, with the trainer's files and settings."""
    files = {**program_files("main"), SETTINGS_FILE: json.dumps(settings(spec), indent=2) + "\n"}
    return Job(
        name=name,
        python=spec.cluster.interpreter,
        program=(PROGRAM_FOLDER, SETTINGS_FILE),
        env=_environment(spec),
        files=files,
        nodes=spec.cluster.nodes,
        devices_per_node=spec.cluster.devices_per_node,
        timeout_s=spec.time_limit_s,
        # Longer than the watchdog's limit: the watchdog reports the hanging rank, gloo only a
        # timeout.
        collective_limit_s=2 * spec.hang_limit_s,
        cluster=spec.cluster,
        sampled=True,
    )


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return the JSON that the trainer reads, schema 2: parts of the spec and what they imply."""
    model = spec.model.model_dump(mode="json")
    ramp_up, by_budget = spec.training.ramp_up, spec.layout.recompute == "budget"
    model["padded_vocab"] = spec.model.padded_vocab(spec.layout.tp)
    return {
        "schema": 2,
        "model": model,
        "lora": spec.lora.model_dump(mode="json") if spec.lora else None,
        "training": {
            **spec.training.model_dump(mode="json"),
            "ramp_up": ramp_up.sizes(spec.training.global_batch) if ramp_up else [],
            **_routing(spec),
        },
        "data": spec.data.model_dump(mode="json"),
        "layout": spec.layout.model_dump(mode="json"),
        "recompute_levels": block_levels(spec.model, spec.layout) if by_budget else [],
        "dp": spec.dp,
        "num_microbatches": spec.layout.num_microbatches(
            spec.world_size, spec.training.global_batch
        ),
        "device": _device(spec),
        "threads": spec.cluster.threads_per_device,
        "hang_limit_s": spec.hang_limit_s,
        "memory_limit_bytes": spec.memory_limit_bytes,
        "memory_parts": spec.memory_parts,
        "checkpoint": spec.checkpoint.model_dump(mode="json"),
        "mlperf": spec.mlperf.model_dump(mode="json") if spec.mlperf else None,
        "expected_parameters": spec.num_parameters,
        "expected_trainable": trainable_parameters(spec.model, spec.lora, spec.layout.tp),
        "events": "steps",
        "logs": "logs",
        "profile": spec.profile.model_dump(mode="json") if spec.profile else None,
    }


def _routing(spec: RunSpec) -> dict[str, Any]:
    """Return how experts are chosen, and the weight of each expert for a pattern."""
    routing, model = spec.training.routing, spec.model
    if not isinstance(model, DecoderShape):
        return {}
    weights = expert_weights(routing, model.num_experts, model.experts_per_token)
    return {"routing": "pattern", "routing_weights": weights} if weights else {}


def _device(spec: RunSpec) -> str:
    return "cpu" if spec.cluster.device == "cpu" else "cuda"


def _environment(spec: RunSpec) -> dict[str, str]:
    environment = {"PYTHONUNBUFFERED": "1"}
    if _device(spec) == "cuda":
        # Expandable segments avoid fragmentation when sizes change.
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        environment |= setup_log(spec)
    if spec.training.compile != "none" and spec.cluster.runs_here:
        # Inductor's default folder in /tmp is lost at reboot. Other hosts keep the default, because
        # a home directory shared by many nodes is slow with small files.
        cache = os.environ.get(COMPILE_CACHE) or str(cache_folder() / "inductor")
        environment[COMPILE_CACHE] = cache
    if spec.cluster.threads_per_device:
        environment["OMP_NUM_THREADS"] = str(spec.cluster.threads_per_device)
    cluster = with_secrets(spec.cluster.env, os.environ)
    return {**environment, **cluster, **extra_environment(spec)}


LOG_FORMAT = LogFormat(
    title="Paceline",
    marks=(b'{"event": "step"', b'"step_time_s": '),
    step_line=native_lines.STEP_LINE,
    read=native_log.read,
    example='JSON lines with `"event": "step"`',
    numbering="from 1",
    precedence=2,
)
