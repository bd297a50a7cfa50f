"""Job for DeepSpeed-Chat's fine-tuning, with arguments in the order of its scripts.

`sft_program.py` accepts the same arguments and a few more. With engine_settings.program, they are
passed to the `main.py` of a DeepSpeed-Chat checkout.

A shape becomes a published OPT model, or an OPT configuration.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.secrets import is_secret
from paceline.core.shape import DecoderShape, Shape
from paceline.engines.deepspeed_chat import checkout
from paceline.engines.launch.environments import interpreter, not_installed
from paceline.engines.launch.programs import launch, program_file
from paceline.files.documents import parse_json, read_json, read_text
from paceline.files.home import home_path
from paceline.files.staged import hub_environment, staged_repository

PUBLISHED = {
    (12, 768, 12): "facebook/opt-125m",
    (24, 1024, 16): "facebook/opt-350m",
    (24, 2048, 32): "facebook/opt-1.3b",
    (32, 2560, 32): "facebook/opt-2.7b",
    (32, 4096, 32): "facebook/opt-6.7b",
    (40, 5120, 40): "facebook/opt-13b",
    (48, 7168, 56): "facebook/opt-30b",
    (64, 9216, 72): "facebook/opt-66b",
}
"""Checkpoint by layers, hidden size and heads (Zhang et al., arXiv:2205.01068, table 1)."""
PUBLISHED_VOCABULARY = 50272


def published_name(shape: Shape) -> str | None:
    """Return the Hugging Face name of the OPT model with this shape, or None."""
    if shape.kind != "decoder" or shape.vocab_size != PUBLISHED_VOCABULARY:
        return None
    return PUBLISHED.get((shape.num_layers, shape.hidden_size, shape.num_heads))


def opt_configuration(shape: Shape) -> dict[str, Any]:
    """Return the shape as config.json of transformers' OPT; padding and end share a token."""
    model = cast(DecoderShape, shape)
    end = min(2, model.vocab_size - 1)
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": model.padded_vocab(),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "ffn_dim": model.ffn_size,
        "max_position_embeddings": model.max_positions,
        "word_embed_proj_dim": model.embed_dim,
        "do_layer_norm_before": model.norm_position == "pre",
        "activation_function": "relu",
        "dropout": model.dropout,
        "attention_dropout": model.dropped_probabilities,
        "init_std": 0.02,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": 1 if model.vocab_size > 1 else 0,
    }


def lacks_tokenizer_name(folder: Path) -> bool:
    """Return whether a model folder lacks the name of the tokenizer for Lambda's program."""
    try:
        config = parse_json(read_text(folder / "config.json"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and not cast(dict[str, Any], config).get("_name_or_path")


def folder_differences(shape: DecoderShape, folder: Path) -> list[str]:
    """Return how a model folder differs from the planned shape; empty if unreadable."""
    config = read_json(folder / "config.json")
    if not config:
        return []
    expected = opt_configuration(shape)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "vocab_size")
    return [
        f"engine_settings.model: {folder} has {name} {config[name]}, the recipe {expected[name]}"
        for name in sizes
        if name in config and config[name] != expected[name]
    ]


REQUIREMENTS = ("deepspeed==0.19.8", "transformers==4.57.6", "datasets==4.3.0")
IMPORTS = ("deepspeed", "transformers", "datasets")
PACELINE_PROGRAM = "sft_program.py"
MODEL_FOLDER = "model"
PUBLISHED_DATA = "Dahoas/full-hh-rlhf"
"""Training data of the published runs."""
EPOCHS = 100
LORA_MODULES = "decoder.layers."
LORA_LR = 5e-4
LOSS_SCALE_POWER, LOSS_SCALE_WINDOW, HYSTERESIS = 16, 100, 2
EVALUATION_BATCH = 4
STEPS_PER_PRINT = 1
"""Steps between lines of DeepSpeed's timer, which synchronizes the device at every step anyway."""
REPLACEABLE = ("data_output_path", "per_device_eval_batch_size", "num_train_epochs")
"""Arguments that change no figure of a run, so that an extra argument replaces them."""
PROGRAMS = (PACELINE_PROGRAM, "sft_data_program.py", "sft_model_program.py")
HOSTFILE, ENVIRONMENT_FILE = "hostfile", ".deepspeed_env"


def missing(spec: RunSpec) -> str | None:
    """Return a problem if no environment or other interpreter has deepspeed and transformers."""
    return not_installed(spec, IMPORTS)


def job(spec: RunSpec, name: str) -> Job:
    """Return the Job: the program once per device, or DeepSpeed's launcher once per node."""
    per_device = not _uses_deepspeed_launcher(spec)
    env = _environment(spec)
    return launch(
        _without_variables(spec, env),
        name,
        command(spec),
        python=interpreter(spec),
        env=env,
        files={**_files(spec), **({} if per_device else launcher_files(spec))},
        per="device" if per_device else "node",
        replaceable=REPLACEABLE,
    )


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return program and arguments as started, with the rank's placeholder."""
    return {"command": command(spec), "environment": _environment(spec)}


def command(spec: RunSpec) -> list[str]:
    """Return the command for each process, with its placeholders."""
    prepare = [] if uses_paceline_program(spec) else _preparation(spec)
    if _uses_deepspeed_launcher(spec):
        return [
            *prepare,
            *("{python}", "-u", "-m", "deepspeed.launcher.launch"),
            f"--world_info={world_info(spec)}",
            "--node_rank={node_rank}",
            "--master_addr={master_addr}",
            "--master_port={master_port}",
            program(spec),
            *arguments(spec),
        ]
    rank = "--local_rank={local_rank}"
    return [*prepare, "{python}", "-u", program(spec), rank, *arguments(spec)]


def hosts(spec: RunSpec) -> list[str]:
    """Return hosts in rank order; numbered names if a scheduler has yet to choose them."""
    cluster_hosts = spec.cluster.hosts
    return (
        [*cluster_hosts]
        if cluster_hosts
        else [f"node-{number}" for number in range(spec.cluster.nodes)]
    )


def world_info(spec: RunSpec) -> str:
    """Return hosts and their devices in the form of DeepSpeed's launcher: JSON in base64."""
    devices = list(range(spec.cluster.devices_per_node))
    content = json.dumps(dict.fromkeys(hosts(spec), devices))
    return base64.urlsafe_b64encode(content.encode()).decode()


def launcher_files(spec: RunSpec) -> dict[str, str]:
    """Return hostfile and environment file for the same start by `deepspeed --hostfile`."""
    slots = spec.cluster.devices_per_node
    env = _environment(spec)
    variables = {**env, **_without_variables(spec, env).cluster.env}
    public = {name: value for name, value in variables.items() if not is_secret(name, value)}
    return {
        HOSTFILE: "".join(f"{host} slots={slots}\n" for host in hosts(spec)),
        ENVIRONMENT_FILE: "".join(f"{name}={value}\n" for name, value in public.items()),
    }


def _uses_deepspeed_launcher(spec: RunSpec) -> bool:
    return spec.engine_settings.get("launcher") == "deepspeed"


def _environment(spec: RunSpec) -> dict[str, str]:
    accelerator = {"DS_ACCELERATOR": "cpu"} if spec.cluster.device == "cpu" else {}
    if uses_paceline_program(spec):
        return accelerator
    is_staged = all(map(_is_staged, (model_name(spec), *_data_settings(spec))))
    hub = hub_environment() if is_staged else {}
    return {**accelerator, **hub, **checkout.environment(spec)}


def _is_staged(name: str) -> bool:
    """Return whether a model or data set needs no download: a local path, or staged by its id."""
    return Path(name).exists() or staged_repository(name) is not None


def _without_variables(spec: RunSpec, env: Mapping[str, str]) -> RunSpec:
    """Return the run without the cluster's PYTHONPATH if `env` contains it with another folder."""
    if "PYTHONPATH" not in env:
        return spec
    variables = {name: value for name, value in spec.cluster.env.items() if name != "PYTHONPATH"}
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"env": variables})})


def _files(spec: RunSpec) -> dict[str, str]:
    """Return Paceline's programs, and the model's configuration unless another model is set."""
    if not uses_paceline_program(spec):
        name = checkout.PREPARATION
        return program_file(__package__ or "", name) if name in command(spec) else {}
    files: dict[str, str] = {}
    for name in PROGRAMS:
        files |= program_file(__package__ or "", name)
    if model_name(spec) == MODEL_FOLDER and spec.model.kind == "decoder":
        configuration = json.dumps(opt_configuration(spec.model), indent=2) + "\n"
        files[f"{MODEL_FOLDER}/config.json"] = configuration
    return files


def uses_paceline_program(spec: RunSpec) -> bool:
    """Return whether Paceline's program is used, not that of a checkout."""
    return spec.engine_settings.get("program") is None


def program(spec: RunSpec) -> str:
    """Return the Python file to start."""
    return str(spec.engine_settings.get("program") or PACELINE_PROGRAM)


def model_name(spec: RunSpec) -> str:
    """Return the model to load: as set, else by the shape.

    The shape's configuration is used with Paceline's program, the published name with a checkout's.
    """
    model = spec.engine_settings.get("model")
    if model is not None:
        return _absolute("engine_settings.model", str(model))
    return (
        MODEL_FOLDER if uses_paceline_program(spec) else published_name(spec.model) or MODEL_FOLDER
    )


def _preparation(spec: RunSpec) -> list[str]:
    return checkout.preparation(spec, model_name(spec), _data_sources(spec))


def data_names(spec: RunSpec) -> list[str]:
    """Return the data sets as the program reads them."""
    if uses_paceline_program(spec):
        return _data_settings(spec)
    return checkout.data_places(spec, model_name(spec), _data_sources(spec))


def _data_sources(spec: RunSpec) -> list[str]:
    """Return the data sets of a checkout's program, staged ones by their paths.

    While it is offline, `datasets` loads data by a path only.
    """
    return [str(staged_repository(name) or name) for name in _data_settings(spec)]


def _data_settings(spec: RunSpec) -> list[str]:
    """Return the data sets: as set, else the recipe's.

    A checkout's program gets the published data set instead of synthetic data.
    """
    data = spec.engine_settings.get("data")
    if data is not None:
        names = str(data).split(",")
        return [_absolute("engine_settings.data", name.strip()) for name in names]
    if spec.data.source == "jsonl" and spec.data.path:
        return [_absolute("data.path", spec.data.path)]
    return [spec.data.source if uses_paceline_program(spec) else PUBLISHED_DATA]


def arguments(spec: RunSpec) -> list[str]:
    """Return the command line after the program's name, without its rank."""
    training, layout = spec.training, spec.layout
    settings = spec.engine_settings
    split = spec.data.split or (1, 0, 0)
    accumulation = layout.num_microbatches(spec.world_size, training.global_batch)
    options: list[tuple[str, object]] = [
        ("data_path", data_names(spec)),
        ("data_split", ",".join(f"{size:g}" for size in split)),
        ("data_output_path", settings.get("data_output_path") or _data_folder(spec)),
        ("model_name_or_path", model_name(spec)),
        ("per_device_train_batch_size", layout.micro_batch),
        ("per_device_eval_batch_size", EVALUATION_BATCH),
        ("max_seq_len", training.seq_len),
        ("learning_rate", training.lr),
        ("weight_decay", training.weight_decay),
        *_dropout(spec),
        ("gradient_accumulation_steps", accumulation),
        ("lr_scheduler_type", scheduler(spec)),
        ("seed", training.seed),
        ("gradient_checkpointing", layout.recompute == "full"),
        ("zero_stage", layout.zero_stage),
        *_adapters(spec),
        ("offload", bool(settings.get("offload"))),
        ("deepspeed", True),
        ("num_warmup_steps", training.lr_schedule.warmup),
        *_length(spec),
        *(_paceline_arguments(spec) if uses_paceline_program(spec) else _checkout_arguments(spec)),
    ]
    return [word for name, value in options for word in _words(name, value)]


def scheduler(spec: RunSpec) -> str:
    """Return transformers' name of the learning rate schedule."""
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


def _length(spec: RunSpec) -> Iterator[tuple[str, object]]:
    """Yield the epochs, and the steps unless the program trains whole epochs only."""
    epochs = spec.engine_settings.get("epochs")
    if uses_paceline_program(spec) or checkout.has_max_steps(spec):
        yield "num_train_epochs", epochs or EPOCHS
        yield "max_steps", spec.training.steps
    else:
        yield "num_train_epochs", epochs or 1


def _dropout(spec: RunSpec) -> Iterator[tuple[str, object]]:
    model = spec.model
    if model.kind != "decoder" or model.dropout or model.dropped_probabilities:
        return
    if uses_paceline_program(spec) or not checkout.accepts(spec, "--dropout"):
        yield "disable_dropout", True
    else:
        yield "dropout", 0.0


def _data_folder(spec: RunSpec) -> str:
    """Return the default folder of tokenized data; Paceline's program writes none."""
    if uses_paceline_program(spec):
        return "data_files"
    return f"{checkout.node_folder(spec, model_name(spec), _data_sources(spec))}/data_files"


def _checkout_arguments(spec: RunSpec) -> Iterator[tuple[str, object]]:
    """Yield the dtype for a checkout's program: default fp16, in older versions the only one."""
    if spec.training.dtype != "fp16":
        yield "dtype", spec.training.dtype


def _paceline_arguments(spec: RunSpec) -> Iterator[tuple[str, object]]:
    """Yield arguments that only Paceline's program accepts, if not at their defaults."""
    training, scale = spec.training, spec.training.loss_scale
    yield "dtype", training.dtype
    yield "attention", spec.engine_settings.get("attention") or "eager"
    yield "steps_per_print", spec.engine_settings.get("steps_per_print") or STEPS_PER_PRINT
    yield "gradient_clipping", training.grad_clip
    if training.lr_schedule.kind != "constant":
        end = training.lr_schedule.warmup + training.steps
        yield "lr_decay_steps", training.lr_schedule.decay or end
    if training.dtype == "fp16":
        yield "initial_scale_power", round(math.log2(scale.initial))
        yield "loss_scale_window", scale.window
        yield "hysteresis", scale.hysteresis


def _words(name: str, value: object) -> list[str]:
    """Return the words of one argument; a switch that is off has none."""
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    values = cast(list[object], value) if isinstance(value, list) else [value]
    return [f"--{name}", *map(str, values)]


def _absolute(field: str, name: str) -> str:
    """Return a local path as seen from the run folder; a Hugging Face name stays unchanged."""
    path = home_path(field, name)
    return str(path.absolute()) if path.exists() else name
