"""DeepSpeed-Chat's supervised fine-tuning: job creation and log format."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape, LoraSpec
from paceline.engines.deepspeed_chat import checkout
from paceline.engines.deepspeed_chat.launch import IMPORTS as IMPORTS
from paceline.engines.deepspeed_chat.launch import (
    LOSS_SCALE_POWER,
    LOSS_SCALE_WINDOW,
    arguments,
    folder_differences,
    lacks_tokenizer_name,
    published_name,
    uses_paceline_program,
)
from paceline.engines.deepspeed_chat.launch import REQUIREMENTS as REQUIREMENTS
from paceline.engines.deepspeed_chat.launch import job as job
from paceline.engines.deepspeed_chat.launch import missing as missing
from paceline.engines.deepspeed_chat.launch import settings as settings
from paceline.engines.deepspeed_chat.log_format import LOG_FORMAT as LOG_FORMAT
from paceline.engines.launch.programs import unknown_settings
from paceline.engines.support import (
    DEEPSEEK,
    NO_CHECKPOINTS,
    OPT_SHAPE,
    SHAPE_OPTIONS,
    WITHOUT_RAMP_UP,
    Support,
    TestedProgram,
    no,
    only,
    refusals,
)
from paceline.files.home import home_path

SETTINGS = (
    "program",
    "fork",
    "launcher",
    "model",
    "data",
    "data_output_path",
    "epochs",
    "offload",
    "attention",
    "steps_per_print",
)
PACELINE_PROGRAM_SETTINGS = ("attention", "steps_per_print")
LAUNCHERS = ("paceline", "deepspeed")
ATTENTIONS = ("eager", "sdpa")
LORA_TARGETS = {"q", "k", "v", "o", "up", "down"}

_OPT = "it fine-tunes decoders with OPT's shape"
_DATA_PARALLEL = no("DeepSpeed-Chat is data-parallel only, with ZeRO 0 to 3")
PACELINE_PROGRAM: Support = {
    **NO_CHECKPOINTS,
    **WITHOUT_RAMP_UP,
    **SHAPE_OPTIONS,
    **DEEPSEEK,
    **OPT_SHAPE,
    "model.kind": only("decoder", reason=_OPT),
    "model.num_experts": no(_OPT),
    "model.activation": only("relu", reason=_OPT),
    "model.bias": only(True, reason=_OPT),
    "model.tied_embeddings": only(True, reason=_OPT),
    "model.embedding_norm": no(_OPT),
    "lora.alpha": only(1.0, reason="DeepSpeed-Chat scales adapters by 1 / rank"),
    "lora.dropout": no("its adapters have no dropout"),
    "training.dtype": only("fp16", "bf16", "fp32"),
    "training.compile": no("DeepSpeed-Chat does not use torch.compile"),
    "training.betas": only(
        (0.9, 0.95), reason="DeepSpeed-Chat's Adam uses 0.9 and 0.95", remedy="leave it out"
    ),
    "training.eps": only(1e-8, reason="DeepSpeed-Chat's Adam has a fixed epsilon"),
    "training.lr_schedule.min_lr": no("its learning rate decays to 0"),
    "training.lr_schedule.unit": only("steps", reason="it counts steps"),
    "training.initial_weights": no(
        "its format is the native trainer's", "engine_settings.model loads weights"
    ),
    "layout.tp": _DATA_PARALLEL,
    "layout.pp": _DATA_PARALLEL,
    "layout.cp": _DATA_PARALLEL,
    "layout.vp": _DATA_PARALLEL,
    "layout.ep": _DATA_PARALLEL,
    "layout.dp_shard": no("its ZeRO shards the states over all ranks"),
    "layout.recompute": only("none", "full", reason="it recomputes full layers or none"),
    "data.source": only("synthetic", "stdlib", "jsonl", reason="its samples are records of text"),
    "data.packing": only("padded", reason="a sample is one record, truncated or padded"),
    "data.loss_on": only("all", reason="its loss is over all positions, padding included"),
    "data.loss_mask": no("its loss is over all positions, padding included"),
    "data.split_part": only(0, reason="fine-tuning uses the first part of a split"),
}
CHECKOUT: Support = {
    **PACELINE_PROGRAM,
    "training.dtype": only("fp16", "bf16"),
    "training.grad_clip": only(1.0, reason="DeepSpeed-Chat clips gradients at 1"),
}
SUPPORT = {"own program": PACELINE_PROGRAM, "a checkout's": CHECKOUT}
TESTED_PROGRAMS = (
    TestedProgram("DeepSpeed 0.19.8, without a checkout", "ZeRO 0 to 3, SSH, Slurm"),
    TestedProgram("LambdaLabsML 7770cec", "2x2 ranks, two SSH hosts"),
    TestedProgram("deepspeedai 45b4b71", "one and two ranks"),
)


def unsupported(spec: RunSpec) -> list[str]:
    """Return what DeepSpeed-Chat cannot do of `spec`, one sentence each."""
    support = PACELINE_PROGRAM if uses_paceline_program(spec) else CHECKOUT
    if spec.engine_settings.get("data") is not None:
        support = {field: limit for field, limit in support.items() if field != "data.source"}
    problems = refusals(spec, support)
    if not isinstance(spec.model, DecoderShape):
        return problems
    return [
        *unknown_settings(spec, SETTINGS),
        *problems,
        *_setting_problems(spec, spec.model),
        *_training_problems(spec, spec.model),
        *(_adapter_problems(spec, spec.lora) if spec.lora else ()),
        *(() if uses_paceline_program(spec) else _checkout_problems(spec)),
    ]


def _setting_problems(spec: RunSpec, model: DecoderShape) -> Iterator[str]:
    settings = spec.engine_settings
    choices = (("launcher", LAUNCHERS), ("attention", ATTENTIONS), ("fork", checkout.FORKS))
    for name, allowed in choices:
        if settings.get(name) not in (None, *allowed):
            yield f"engine_settings.{name} {settings[name]} must be one of {', '.join(allowed)}"
    for name in ("epochs", "steps_per_print"):
        value = settings.get(name)
        if value is not None and (isinstance(value, bool | float | str) or value < 1):
            yield f"engine_settings.{name} {value} must be a whole number of at least 1"
    if settings.get("offload") not in (None, False, True, "cpu"):
        yield f"engine_settings.offload {settings['offload']} must be one of true, false, cpu"
    if settings.get("offload") and spec.layout.zero_stage == 0:
        yield "engine_settings.offload needs layout.zero_stage 1 or more, which shards the states"
    folder = home_path("engine_settings.model", str(settings.get("model") or ""))
    if settings.get("model"):
        yield from folder_differences(model, folder)


def _training_problems(spec: RunSpec, model: DecoderShape) -> Iterator[str]:
    training = spec.training
    if model.final_norm != (model.norm_position == "pre"):
        yield f"model.final_norm {model.final_norm}: OPT has it only with model.norm_position=pre"
    if training.dtype == "fp16" and spec.cluster.device == "cpu":
        yield "training.dtype fp16: on a CPU, DeepSpeed supports bf16 and fp32 only"
    if training.dtype == "fp16" and math.log2(training.loss_scale.initial) % 1:
        yield "training.loss_scale.initial must be a power of two for DeepSpeed"
    if training.seq_len > model.max_positions:
        yield f"training.seq_len {training.seq_len} exceeds the {model.max_positions} positions"


def _adapter_problems(spec: RunSpec, lora: LoraSpec) -> Iterator[str]:
    if set(lora.targets) != LORA_TARGETS:
        yield f"lora.targets must be all of {', '.join(sorted(LORA_TARGETS))} in DeepSpeed-Chat"
    if spec.layout.recompute == "full" and not lora.train_rest and not uses_paceline_program(spec):
        yield "lora.train_rest false: DeepSpeed-Chat does not support it with layout.recompute=full"


def _checkout_problems(spec: RunSpec) -> Iterator[str]:
    """Yield the settings that a checkout's program fixes."""
    training, settings = spec.training, spec.engine_settings
    if not Path(str(settings["program"])).is_absolute():
        yield f"engine_settings.program {settings['program']} must be an absolute path of a main.py"
    yield from _unknown_arguments(spec)
    for name in PACELINE_PROGRAM_SETTINGS:
        if settings.get(name) is not None:
            yield f"engine_settings.{name} works with Paceline's program only"
    if settings.get("model") is None and published_name(spec.model) is None:
        yield "no published OPT has this shape: set engine_settings.model to a folder with one"
    if checkout.fork(spec) == checkout.LAMBDA:
        if spec.cluster.device == "cpu":
            yield "device cpu: Lambda's program calls CUDA; remove engine_settings.program"
        folder = home_path("engine_settings.model", str(settings.get("model") or ""))
        if settings.get("model") and lacks_tokenizer_name(folder):
            yield (
                f"engine_settings.model: {folder}/config.json has no _name_or_path, by which "
                "Lambda's program loads the tokenizer; set a hub name"
            )
    scale = training.loss_scale
    default = (2.0**LOSS_SCALE_POWER, LOSS_SCALE_WINDOW)
    if training.dtype == "fp16" and (scale.initial, scale.window) != default:
        yield (
            f"training.loss_scale: DeepSpeed-Chat always starts at {default[0]:g} with a window of "
            f"{default[1]}"
        )


def _unknown_arguments(spec: RunSpec) -> Iterator[str]:
    """Yield arguments that a checkout's program would reject, if its source is readable here."""
    if checkout.source(spec) is None:
        return
    options = (word for word in arguments(spec) if word.startswith("--"))
    unknown = [name for name in options if not checkout.accepts(spec, name)]
    if unknown:
        yield (
            f"engine_settings.program {checkout.program_path(spec)} does not accept "
            f"{', '.join(unknown)}: use the program of LambdaLabsML/DeepSpeedExamples "
            "(`paceline recipes stage`)"
        )


def last_step(spec: RunSpec) -> int | None:
    """Return warmup plus timed steps: the log counts both, and warmup comes first.

    A program that trains whole epochs has no requested last step.
    """
    if not uses_paceline_program(spec) and not checkout.has_max_steps(spec):
        return None
    return spec.training.lr_schedule.warmup + spec.training.steps
