"""What NeMo 1 and NVIDIA's published procedure cannot do of a RunSpec, one sentence each."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.launch.batch import needs_queue
from paceline.engines.launch.model_options import option_problems
from paceline.engines.launch.programs import unknown_settings
from paceline.engines.nemo.overrides import ACTIVATIONS
from paceline.engines.nemo.procedure import (
    KNOWN,
    PROFILE,
    SIZES,
    TRACE_STEPS,
    launch_script,
    model_size,
    stage_path,
)
from paceline.engines.samples import training_problems

DTYPES = ("bf16", "fp8")
SCHEDULES = ("1f1b", "interleaved")
RANKS = re.compile(r"[0-9]+(,[0-9]+)*")
SWITCHES = ("dataset", "profile", "nccl_trace", "profile_gpu_metrics", "profile_cpu")
STEPS = ("profile_start_step", "profile_stop_step")


def refusals(spec: RunSpec) -> Iterator[str]:
    """Everything that stands against a start."""
    yield from unknown_settings(spec, KNOWN)
    yield from needs_queue(spec)
    yield from _stage_path(spec)
    yield from _model(spec)
    yield from training_problems(spec)
    yield from _training(spec)
    yield from _layout(spec)
    yield from _data(spec)
    yield from _values(spec)
    yield from _profile(spec)
    if (named := launch_script(spec)) is not None:
        yield from _recipes_own(spec, named.name)


def _stage_path(spec: RunSpec) -> Iterator[str]:
    if not spec.engine_settings.get("stage_path"):
        yield "engine_settings.stage_path is missing: STAGE_PATH, where the image lies"
    elif re.search("[:,]", path := str(stage_path(spec))):
        yield f"engine_settings.stage_path {path} holds `:` or `,`, which part a container's mounts"


def _model(spec: RunSpec) -> Iterator[str]:
    model = spec.model
    if not isinstance(model, DecoderShape) or model.num_experts > 1 or spec.lora:
        yield "nemo pre-trains dense decoders: no diffusion, experts or adapters"
        return
    yield from option_problems(model)
    if model.embedding_size or model.norm_position == "post":
        yield "a narrower embedding or norms behind the blocks are not in NeMo's GPT"
    if model.embedding_norm or not model.final_norm or model.position_offset:
        yield "model.embedding_norm, final_norm false and position_offset are not in NeMo's GPT"
    if (model.activation, model.gated_ffn) not in ACTIVATIONS:
        gate = "with" if model.gated_ffn else "without"
        yield f"model.activation {model.activation} {gate} a gate is not in NeMo's GPT"


def _training(spec: RunSpec) -> Iterator[str]:
    training, schedule = spec.training, spec.training.lr_schedule
    if training.dtype not in DTYPES:
        yield f"dtype {training.dtype} is none of the procedure's: bf16 or fp8"
    if schedule.kind == "linear" or schedule.unit != "steps":
        yield "training.lr_schedule must be constant or cosine, counted in steps"
    if schedule.kind == "constant" and schedule.warmup:
        yield "training.lr_schedule.warmup is not handed on to NeMo with a constant rate"
    if training.compile != "none":
        yield f"training.compile {training.compile} is not handed on to NeMo: use none"


def _layout(spec: RunSpec) -> Iterator[str]:
    layout = spec.layout
    if layout.zero_stage != 1:
        yield (
            f"layout.zero_stage {layout.zero_stage}: NeMo's distributed Adam parts the optimizer's "
            "states alone (--set layout.zero_stage=1)"
        )
    if layout.dp_shard is not None:
        yield "layout.dp_shard: NeMo parts the states over all replicas"
    if layout.effective_schedule not in SCHEDULES:
        yield f"layout.schedule {layout.schedule}: NeMo's pipelines run 1f1b"


def _data(spec: RunSpec) -> Iterator[str]:
    data = spec.data
    if data.source != "synthetic":
        yield (
            f"data.source {data.source} is not handed on to NeMo: use synthetic, NeMo's mock data; "
            "engine_settings.dataset=true trains on the llama3.1-dataset of STAGE_PATH instead"
        )
    if data.packing != "packed" or data.loss_mask is not None or data.split is not None:
        yield "data.packing padded, loss_mask and split are not handed on to NeMo: leave them out"


def _recipes_own(spec: RunSpec, name: str) -> Iterator[str]:
    """What the recipe's launch.sh is not told, for its variables are few."""
    layout = spec.layout
    if model_size(spec) is None:
        yield f"{name} of the recipe trains Llama 3.1 of {', '.join(SIZES)} and nothing else"
    if layout.micro_batch != 1:
        yield f"layout.micro_batch {layout.micro_batch}: {name} has no variable for it and takes 1"
    if layout.recompute != "none":
        yield f"layout.recompute {layout.recompute}: {name} has no variable for it; use none"
    if spec.engine_settings.get("dataset") is not None:
        yield "engine_settings.dataset is for Paceline's own launch.sh; leave script or dataset out"


def _values(spec: RunSpec) -> Iterator[str]:
    """Settings that are not what their names say."""
    asked = {name: value for name, value in spec.engine_settings.items() if value is not None}
    for name in SWITCHES:
        if not isinstance(asked.get(name, False), bool):
            yield f"engine_settings.{name} {asked[name]} is neither true nor false"
    for name in STEPS:
        step = asked.get(name, 0)
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            yield f"engine_settings.{name} {step} is no whole number from 0 on"
    ranks = str(asked.get("profile_ranks", 0))
    if not RANKS.fullmatch(ranks):
        yield f"engine_settings.profile_ranks {ranks} is no list of ranks such as 0,8"


def _profile(spec: RunSpec) -> Iterator[str]:
    asked = spec.engine_settings
    if asked.get("profile") and asked.get("nccl_trace"):
        yield "engine_settings.profile and nccl_trace exclude each other: two runs"
    stray = [name for name in PROFILE if asked.get(name) is not None]
    if stray and not asked.get("profile"):
        yield f"engine_settings.{stray[0]} is for engine_settings.profile=true"
    if asked.get("nccl_trace") and spec.training.steps != TRACE_STEPS:
        yield f"a traced run of the recipe trains {TRACE_STEPS} steps (--set steps={TRACE_STEPS})"
