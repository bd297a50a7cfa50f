"""What llmb-run is told of a run, and what it cannot be asked for."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.core.secrets import is_secret
from paceline.engines.launch.batch import asked_limit_s, needs_queue
from paceline.engines.launch.programs import unknown_settings
from paceline.engines.megatron_bridge.refusals import GPUS, gpu_of, not_told
from paceline.engines.nemo.installation import CONFIG_FILE, Installation, installation
from paceline.engines.nemo.procedure import model_size
from paceline.files.home import home_path

PROGRAM = "llmb-run"
WORKLOAD = "pretrain_llama3.1"
KNOWN = ("form", "llmb_install", "workload", "size", "variant", "profile", "force")
SWITCHES = ("profile", "force")
FP8_RECIPES = {"fp8": "cs", "mxfp8": "mx"}
DTYPES = ("bf16", *FP8_RECIPES, "nvfp4")
GPUS_PER_NODE = {"gb200": 4, "gb300": 4}
"""What llmb-run takes for a node; any other GPU stands eight a node."""


def refusals(spec: RunSpec) -> Iterator[str]:
    """Everything that stands against a start."""
    yield from unknown_settings(spec, KNOWN)
    yield from needs_queue(spec)
    yield from _settings(spec)
    yield from _machine(spec)
    yield from _model(spec)
    yield from not_told(spec)
    yield from _installed(spec)


def install_folder(spec: RunSpec) -> Path:
    """LLMB_INSTALL."""
    text = str(spec.engine_settings.get("llmb_install", ""))
    return home_path("engine_settings.llmb_install", text).absolute()


def workload_of(spec: RunSpec) -> str:
    """The workload as llmb-run calls it."""
    return str(spec.engine_settings.get("workload") or WORKLOAD)


def size_of(spec: RunSpec) -> str | None:
    """The model's size as llmb-run calls it: as named, else that of the Llama 3.1."""
    return str(spec.engine_settings.get("size") or model_size(spec) or "") or None


def recipes_variables(spec: RunSpec) -> dict[str, str]:
    """What the recipe's launch.sh reads of layout, batch and length, by its names."""
    layout, training, variant = spec.layout, spec.training, spec.engine_settings.get("variant")
    limit_s = asked_limit_s(spec)
    return {
        "TP": str(layout.tp),
        "PP": str(layout.pp),
        "CP": str(layout.cp),
        "VP": str(layout.vp) if layout.vp > 1 else "None",
        **({"EP": str(layout.ep)} if layout.ep > 1 else {}),
        "MBS": str(layout.micro_batch),
        "GBS": str(training.global_batch),
        "MAX_STEPS": str(training.steps),
        **({"FP8_RECIPE": FP8_RECIPES[training.dtype]} if training.dtype in FP8_RECIPES else {}),
        **({"CONFIG_VARIANT": str(variant)} if variant else {}),
        **({"TIME_LIMIT": _clock(limit_s)} if limit_s else {}),
    }


def _clock(seconds: float) -> str:
    """HH:MM:SS, by whole minutes that Slurm counts."""
    minutes = -(-timedelta(seconds=seconds) // timedelta(minutes=1))
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def _settings(spec: RunSpec) -> Iterator[str]:
    asked = spec.engine_settings
    if not asked.get("llmb_install"):
        yield "engine_settings.llmb_install is missing: LLMB_INSTALL, where llmb-run is called"
    for name in SWITCHES:
        if not isinstance(asked.get(name, False), bool):
            yield f"engine_settings.{name} {asked[name]} is neither true nor false"
    for name, value in spec.cluster.env.items():
        if not is_secret(name, value) and shlex.quote(value) != value:
            yield f"cluster.env: {name} holds a character that llmb-run does not take in --env"


def _machine(spec: RunSpec) -> Iterator[str]:
    gpu, cluster = gpu_of(spec), spec.cluster
    if gpu is None:
        yield f"device {cluster.device} has no performance recipes: {', '.join(GPUS)} have"
        return
    per_node = GPUS_PER_NODE.get(gpu, 8)
    if cluster.nodes > 1 and cluster.devices_per_node != per_node:
        yield (
            f"devices_per_node {cluster.devices_per_node}: llmb-run takes {per_node} {gpu} a node"
        )


def _model(spec: RunSpec) -> Iterator[str]:
    if spec.model.kind != "decoder" or spec.lora is not None:
        yield "a recipe is started to pre-train decoders: no diffusion, no adapters"
    elif size_of(spec) is None:
        yield f"{spec.recipe} is no Llama 3.1: name engine_settings.workload and size"
    if spec.training.dtype not in DTYPES:
        yield f"dtype {spec.training.dtype} is none of llmb-run's: {', '.join(DTYPES)}"


def _installed(spec: RunSpec) -> Iterator[str]:
    """Where the installation goes before what the run asks for."""
    folder = install_folder(spec)
    if not spec.engine_settings.get("llmb_install") or not (folder / CONFIG_FILE).is_file():
        return
    try:
        stated = installation(folder, workload_of(spec))
    except UserError as error:
        yield str(error)
        return
    yield from _contradictions(spec, stated)


def _contradictions(spec: RunSpec, stated: Installation) -> Iterator[str]:
    site = spec.cluster.slurm
    for name, asked, there in (
        ("device", gpu_of(spec), stated.gpu_type),
        ("slurm.account", site.account, stated.account),
        ("slurm.partition", site.partition, stated.partition),
    ):
        if asked and there and asked != there:
            yield f"cluster.{name} {asked}: {CONFIG_FILE} says {there}, by which llmb-run goes"
    for name, value in recipes_variables(spec).items():
        if stated.variables.get(name, value) != value:
            yield (
                f"{name}={value}: {CONFIG_FILE} exports {name}={stated.variables[name]}, which "
                "llmb-run puts in its place; take it out there"
            )
