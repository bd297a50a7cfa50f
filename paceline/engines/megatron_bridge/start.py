"""How a performance recipe of Megatron-Bridge is started: once a device, without its launcher.

The recipe decides what has no argument (learning rate, overlap, CUDA graphs, what it recomputes of
a layer).
Arguments: NVIDIA-NeMo/Megatron-Bridge, scripts/performance, README.md and argument_parser.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.job import Job
from paceline.core.pipeline import stages_of
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.launch.environments import interpreter
from paceline.engines.launch.programs import launch
from paceline.engines.megatron_bridge.refusals import (
    ENTRIES,
    checkout_of,
    gpu_of,
    precision_of,
    recipe_of,
    refused,
)

FOLDER = "scripts/performance"


def unsupported(spec: RunSpec) -> list[str]:
    """What a performance recipe cannot be asked for of `spec`, one sentence each."""
    return refused(spec)


def missing(spec: RunSpec) -> str | None:
    """The checkout's program, where this machine would start it."""
    entry = Path(checkout_of(spec) or "") / _entry(spec)
    if not spec.cluster.runs_here or entry.is_file():
        return None
    return f"{entry} is not there; engine_settings.checkout names the folder of a checkout"


def settings(spec: RunSpec) -> dict[str, Any]:
    """The arguments by their names."""
    return {"program": _entry(spec), "arguments": _arguments(spec)}


def job(spec: RunSpec, name: str) -> Job:
    """One process a device, in the folder of the checkout."""
    options = _arguments(spec).items()
    words = [word for name, value in options for word in (f"--{name}", value) if word]
    return launch(
        spec,
        name,
        ["{python}", "-u", _entry(spec), *words],
        python=interpreter(spec),
        # As its own launcher has it: a recipe's tokenizer of numbers needs nothing of the hub.
        env={"TRANSFORMERS_OFFLINE": "1"},
        folder=Path(checkout_of(spec) or "/"),
    )


def _entry(spec: RunSpec) -> str:
    return f"{FOLDER}/{spec.engine_settings.get('entry') or ENTRIES[0]}"


def _arguments(spec: RunSpec) -> dict[str, str]:
    """All arguments, without the dashes before their names."""
    layout, training = spec.layout, spec.training
    family, recipe = recipe_of(spec) or ("", "")
    variant = spec.engine_settings.get("variant")
    return {
        "model_family_name": family,
        "model_recipe_name": recipe,
        **({"use_recipes": ""} if spec.engine_settings.get("library") else {}),
        "task": "pretrain",
        "num_gpus": str(spec.world_size),
        "gpus_per_node": str(spec.cluster.devices_per_node),
        "gpu": gpu_of(spec) or "",
        "compute_dtype": precision_of(spec) or "",
        **({"config_variant": str(variant)} if variant else {}),
        "data": "mock",
        "max_steps": str(training.steps),
        "global_batch_size": str(training.global_batch),
        "micro_batch_size": str(layout.micro_batch),
        "seq_length": str(training.seq_len),
        "tensor_model_parallel_size": str(layout.tp),
        "pipeline_model_parallel_size": str(layout.pp),
        "context_parallel_size": str(layout.cp),
        "virtual_pipeline_model_parallel_size": str(layout.vp) if layout.vp > 1 else "None",
        "expert_model_parallel_size": str(layout.ep),
        "use_megatron_fsdp": str(layout.zero_stage == 3).lower(),
        **_recomputed(spec),
    }


def _recomputed(spec: RunSpec) -> dict[str, str]:
    """All layers of each part of a pipeline, where all are recomputed."""
    layout, model = spec.layout, spec.model
    if layout.recompute != "full" or not isinstance(model, DecoderShape):
        return {}
    return {"recompute_num_layers": str(max(stages_of(model, layout)))}
