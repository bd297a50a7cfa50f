"""What DeepSpeed-Chat's supervised fine-tuning cannot do of a RunSpec, one sentence each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.core.run import RunSpec
from paceline.core.shape import LoraSpec, Shape
from paceline.engines.deepspeed_chat.arguments import (
    LOSS_SCALE_POWER,
    LOSS_SCALE_WINDOW,
    arguments,
    own_program,
)
from paceline.engines.deepspeed_chat.checkpoint_shapes import (
    published_name,
    unlike_folder,
    unlike_opt,
)
from paceline.engines.launch.programs import native_settings, unknown_settings
from paceline.files.documents import read_text
from paceline.files.home import home_path

SETTINGS = (
    "program",
    "launcher",
    "model",
    "data",
    "data_output_path",
    "epochs",
    "offload",
    "attention",
    "steps_per_print",
)
ONLY_OURS = ("attention", "steps_per_print")
OF_DEEPSPEED = ("--deepspeed",)
"""What `deepspeed.add_config_arguments` adds to a program's own arguments."""
LAUNCHERS = ("paceline", "deepspeed")
ATTENTIONS = ("eager", "sdpa")
SOURCES = ("synthetic", "stdlib", "jsonl")
DTYPES = ("fp16", "bf16", "fp32")
LORA_TARGETS = {"q", "k", "v", "o", "up", "down"}
BETAS = (0.9, 0.95)


def refusals(spec: RunSpec) -> Iterator[str]:
    """Everything that stands against a start."""
    yield from unknown_settings(spec, SETTINGS)
    yield from unlike_opt(spec.model)
    yield from _settings(spec)
    yield from _layout(spec)
    yield from _training(spec)
    yield from _data(spec)
    if spec.lora is not None:
        yield from _adapters(spec.lora, spec.layout.recompute == "full", own_program(spec))


def _settings(spec: RunSpec) -> Iterator[str]:
    settings = spec.engine_settings
    for name, allowed in (("launcher", LAUNCHERS), ("attention", ATTENTIONS)):
        if settings.get(name) not in (None, *allowed):
            yield f"engine_settings.{name} {settings[name]} is not among {', '.join(allowed)}"
    for name in ("epochs", "steps_per_print"):
        value = settings.get(name)
        if value is not None and (isinstance(value, bool | float | str) or value < 1):
            yield f"engine_settings.{name} {value} is no whole number from 1 on"
    if settings.get("offload") not in (None, False, True, "cpu"):
        yield f"engine_settings.offload {settings['offload']} is not among true, false, cpu"
    if settings.get("offload") and spec.layout.zero_stage == 0:
        yield "engine_settings.offload needs layout.zero_stage 1 or more, which parts the states"
    folder = home_path("engine_settings.model", str(settings.get("model") or ""))
    if settings.get("model") and spec.model.kind == "decoder":
        yield from unlike_folder(spec.model, folder)
    if not own_program(spec):
        yield from _checkout(spec)


def _checkout(spec: RunSpec) -> Iterator[str]:
    """What the program of a checkout leaves no choice of."""
    training, settings = spec.training, spec.engine_settings
    if not Path(str(settings["program"])).is_absolute():
        yield f"engine_settings.program {settings['program']} is no absolute path of a main.py"
    yield from _unknown_arguments(spec, Path(str(settings["program"])))
    for name in ONLY_OURS:
        if settings.get(name) is not None:
            yield f"engine_settings.{name} is an argument of Paceline's own program alone"
    if settings.get("model") is None and published_name(spec.model) is None:
        yield "no published OPT has this shape: engine_settings.model names a folder that has it"
    if training.dtype == "fp32":
        yield "dtype fp32 is none of DeepSpeed-Chat's, which are fp16 and bf16"
    if spec.cluster.device == "cpu":
        yield "device cpu: DeepSpeed-Chat's own program needs a GPU; leave engine_settings.program"
    if training.grad_clip != 1.0:
        yield f"training.grad_clip {training.grad_clip:g}: DeepSpeed-Chat clips at 1.0"
    scale = training.loss_scale
    usual = (2.0**LOSS_SCALE_POWER, LOSS_SCALE_WINDOW)
    if training.dtype == "fp16" and (scale.initial, scale.window) != usual:
        yield (
            f"training.loss_scale: DeepSpeed-Chat begins at {usual[0]:g} with a window of "
            f"{usual[1]} and takes no other"
        )


def _unknown_arguments(spec: RunSpec, program: Path) -> Iterator[str]:
    """Arguments that a checkout's program would end at, where its text can be read here."""
    try:
        text = read_text(program)
    except (OSError, ValueError):
        return
    options = (word for word in arguments(spec) if word.startswith("--"))
    unknown = [name for name in options if name not in (*OF_DEEPSPEED, *_options(text))]
    if unknown:
        yield (
            f"engine_settings.program {program} takes no {', '.join(unknown)}: the recipes are of "
            "LambdaLabsML/DeepSpeedExamples (`paceline stage`)"
        )


def _options(text: str) -> list[str]:
    """The options that a Python program names, in quotation marks as its parser takes them."""
    return re.findall(r"""["'](--\w+)["']""", text)


def _layout(spec: RunSpec) -> Iterator[str]:
    layout = spec.layout
    for axis in ("tp", "pp", "cp", "vp", "ep"):
        if (size := getattr(layout, axis)) > 1:
            yield f"layout.{axis} {size}: DeepSpeed-Chat is data-parallel alone, with ZeRO 0 to 3"
    if layout.dp_shard is not None:
        yield "layout.dp_shard: its ZeRO parts the states over all ranks"
    if layout.recompute == "selective":
        yield "layout.recompute selective: it recomputes whole layers (full) or nothing (none)"


def _training(spec: RunSpec) -> Iterator[str]:
    training = spec.training
    if training.dtype not in DTYPES:
        yield f"dtype {training.dtype} is not among {', '.join(DTYPES)}"
    if training.dtype == "fp16" and spec.cluster.device == "cpu":
        yield "dtype fp16 on a CPU: DeepSpeed computes there in bf16 or fp32"
    if training.betas != BETAS or training.eps != 1e-8:
        yield "training.betas and eps: DeepSpeed-Chat's Adam has 0.9, 0.95 and 1e-8"
    schedule = training.lr_schedule
    if schedule.min_lr or schedule.unit != "steps":
        yield "training.lr_schedule: its rate falls to 0, and steps are what it counts"
    if training.dtype == "fp16" and math.log2(training.loss_scale.initial) % 1:
        yield "training.loss_scale.initial: DeepSpeed's first scale is a power of two"
    if training.compile != "none":
        yield f"training.compile {training.compile}: it compiles nothing"
    for name in native_settings(spec):
        remedy = "; engine_settings.model loads weights" if "weights" in name else ""
        yield f"{name}: DeepSpeed-Chat's first step has none{remedy}"
    if training.seq_len > _positions(spec.model):
        yield f"seq_len {training.seq_len} is beyond {_positions(spec.model)} learned positions"


def _positions(shape: Shape) -> float:
    return shape.max_positions if shape.kind == "decoder" else math.inf


def _data(spec: RunSpec) -> Iterator[str]:
    data = spec.data
    if spec.engine_settings.get("data") is None and data.source not in SOURCES:
        yield f"data.source {data.source} has no samples of text: {', '.join(SOURCES)} have"
    if data.packing != "padded":
        yield "data.packing packed: a sample of DeepSpeed-Chat is one record, cut or filled up"
    if data.loss_on != "all" or data.loss_mask is not None:
        yield "data.loss_on and loss_mask: its loss is over all positions, padding included"
    if data.split_part != 0:
        yield f"data.split_part {data.split_part}: this is the first of the trainings of a split"


def _adapters(lora: LoraSpec, recomputes: bool, ours: bool) -> Iterator[str]:
    if set(lora.targets) != LORA_TARGETS:
        yield f"lora.targets: its adapters are on all of {', '.join(sorted(LORA_TARGETS))}"
    if lora.alpha != 1:
        yield f"lora.alpha {lora.alpha:g}: DeepSpeed-Chat scales adapters by 1 / rank"
    if lora.dropout:
        yield f"lora.dropout {lora.dropout:g}: its adapters drop nothing"
    if recomputes and not lora.train_rest and not ours:
        yield "lora.train_rest false: DeepSpeed-Chat refuses it together with recomputation"
