"""A RunSpec as the arguments of DeepSpeed-Chat's fine-tuning, in the order of its scripts.

`sft_program.py` takes the same ones and a few more; with engine_settings.program they go to the
`main.py` of a DeepSpeed-Chat checkout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

from paceline.core.run import RunSpec
from paceline.engines.deepspeed_chat.checkpoint_shapes import published_name
from paceline.files.home import home_path

OWN_PROGRAM = "sft_program.py"
OWN_MODEL = "model"
PUBLISHED_DATA = "Dahoas/full-hh-rlhf"
"""What the published runs were trained on."""
EPOCHS = 100
LORA_MODULES = "decoder.layers."
LORA_LR = 5e-4
LOSS_SCALE_POWER, LOSS_SCALE_WINDOW, HYSTERESIS = 16, 100, 2
EVALUATION_BATCH = 4
PRINTED_EVERY = 1
"""Steps between two lines of DeepSpeed's timer, which waits for the device at each anyway."""


def own_program(spec: RunSpec) -> bool:
    """Whether ours is started, not that of a checkout."""
    return spec.engine_settings.get("program") is None


def program(spec: RunSpec) -> str:
    """The Python file that is started."""
    return str(spec.engine_settings.get("program") or OWN_PROGRAM)


def model_name(spec: RunSpec) -> str:
    """What is loaded: as set, a shape's own configuration for our program, else the hub's name."""
    named = spec.engine_settings.get("model")
    if named is not None:
        return _absolute("engine_settings.model", str(named))
    return OWN_MODEL if own_program(spec) else published_name(spec.model) or OWN_MODEL


def data_names(spec: RunSpec) -> list[str]:
    """Data sets: as set, else the recipe's own; what is synthetic there is the published one."""
    named = spec.engine_settings.get("data")
    if named is not None:
        names = str(named).split(",")
        return [_absolute("engine_settings.data", name.strip()) for name in names]
    if spec.data.source == "jsonl" and spec.data.path:
        return [_absolute("data.path", spec.data.path)]
    return [spec.data.source if own_program(spec) else PUBLISHED_DATA]


def arguments(spec: RunSpec) -> list[str]:
    """The command line behind the program's name, without its rank."""
    training, layout = spec.training, spec.layout
    settings = spec.engine_settings
    split = spec.data.split or (1, 0, 0)
    accumulation = layout.num_microbatches(spec.world_size, training.global_batch)
    named: list[tuple[str, object]] = [
        ("data_path", data_names(spec)),
        ("data_split", ",".join(f"{size:g}" for size in split)),
        ("data_output_path", settings.get("data_output_path") or "data_files"),
        ("model_name_or_path", model_name(spec)),
        ("per_device_train_batch_size", layout.micro_batch),
        ("per_device_eval_batch_size", EVALUATION_BATCH),
        ("max_seq_len", training.seq_len),
        ("learning_rate", training.lr),
        ("weight_decay", training.weight_decay),
        ("disable_dropout", _drops_nothing(spec)),
        ("gradient_accumulation_steps", accumulation),
        ("lr_scheduler_type", scheduler(spec)),
        ("seed", training.seed),
        ("gradient_checkpointing", layout.recompute == "full"),
        ("zero_stage", layout.zero_stage),
        *_adapters(spec),
        ("offload", bool(settings.get("offload"))),
        ("deepspeed", True),
        ("num_warmup_steps", training.lr_schedule.warmup),
        ("num_train_epochs", settings.get("epochs") or EPOCHS),
        ("max_steps", training.steps),
        *(_own(spec) if own_program(spec) else _foreign(spec)),
    ]
    return [word for name, value in named for word in _words(name, value)]


def scheduler(spec: RunSpec) -> str:
    """transformers' name of the learning rate's schedule."""
    schedule = spec.training.lr_schedule
    if schedule.kind == "constant" and schedule.warmup:
        return "constant_with_warmup"
    return schedule.kind


def _adapters(spec: RunSpec) -> Iterator[tuple[str, object]]:
    if spec.lora is None:
        return
    yield "lora_dim", spec.lora.rank
    yield "lora_module_name", LORA_MODULES
    yield "only_optimize_lora", not spec.lora.train_rest
    lr = spec.lora.lr or spec.training.lr
    if lr != LORA_LR:
        yield "lora_learning_rate", lr


def _foreign(spec: RunSpec) -> Iterator[tuple[str, object]]:
    """Of a checkout's program fp16 is the default, and older ones have no other dtype."""
    if spec.training.dtype != "fp16":
        yield "dtype", spec.training.dtype


def _own(spec: RunSpec) -> Iterator[tuple[str, object]]:
    """What only our program takes, where it is not its default."""
    training, scale = spec.training, spec.training.loss_scale
    yield "dtype", training.dtype
    yield "attention", spec.engine_settings.get("attention") or "eager"
    yield "steps_per_print", spec.engine_settings.get("steps_per_print") or PRINTED_EVERY
    yield "gradient_clipping", training.grad_clip
    if training.lr_schedule.kind != "constant":
        end = training.lr_schedule.warmup + training.steps
        yield "lr_decay_steps", training.lr_schedule.decay or end
    if training.dtype == "fp16":
        yield "initial_scale_power", round(math.log2(scale.initial))
        yield "loss_scale_window", scale.window
        yield "hysteresis", scale.hysteresis


def _drops_nothing(spec: RunSpec) -> bool:
    model = spec.model
    return model.kind == "decoder" and not (model.dropout or model.dropped_probabilities)


def _words(name: str, value: object) -> list[str]:
    """One argument; a switch that is off is left out."""
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    values = cast(list[object], value) if isinstance(value, list) else [value]
    return [f"--{name}", *map(str, values)]


def _absolute(field: str, name: str) -> str:
    """A path of this machine as seen from the run folder; a hub name stays."""
    path = home_path(field, name)
    return str(path.absolute()) if path.exists() else name
