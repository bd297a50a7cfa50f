"""What a performance recipe of Megatron-Bridge is called, and what it cannot be asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from paceline.core.layout import Recompute
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.launch.programs import unknown_settings
from paceline.engines.samples import training_problems

ENTRIES = ("bootstrap.py", "run_script.py")
"""What each rank runs: since 26.08 the first, in the images before the second."""
KNOWN = ("checkout", "family", "recipe", "library", "variant", "precision", "entry")
RECIPES = {
    (32, 4096, 14336): ("llama", "llama3_8b"),
    (80, 8192, 28672): ("llama", "llama3_70b"),
    (126, 16384, 53248): ("llama", "llama31_405b"),
    (61, 7168, 2048): ("deepseek", "deepseek_v3"),
}
"""Family and recipe by layers, width and width of the feed-forward network, or of an expert."""
GPUS = ("h100", "b200", "b300", "gb200", "gb300")
PRECISIONS = {
    "bf16": ("bf16",),
    "fp8": ("fp8_cs", "fp8_sc"),
    "mxfp8": ("fp8_mx",),
    "nvfp4": ("nvfp4",),
}
"""Its names of each dtype; the first is taken where none is named."""


def refused(spec: RunSpec) -> list[str]:
    """Everything that stands against a start, one sentence each."""
    return [
        *unknown_settings(spec, KNOWN),
        *_settings(spec),
        *_model(spec),
        *not_told(spec, ("none", "full")),
    ]


def not_told(spec: RunSpec, recompute: Sequence[Recompute] = ("none",)) -> list[str]:
    """What a performance recipe has no argument for, one sentence each; with `recompute` it has."""
    return [*training_problems(spec), *_layout(spec, recompute), *_data(spec)]


def checkout_of(spec: RunSpec) -> str | None:
    """The folder that holds scripts/performance, as the nodes see it."""
    checkout = spec.engine_settings.get("checkout")
    return str(checkout) if checkout else None


def recipe_of(spec: RunSpec) -> tuple[str, str] | None:
    """Family and recipe: as named, else those of the model's shape."""
    own, model = spec.engine_settings, spec.model
    if own.get("family") and own.get("recipe"):
        return str(own["family"]), str(own["recipe"])
    if not isinstance(model, DecoderShape):
        return None
    return RECIPES.get((model.num_layers, model.hidden_size, model.ffn_size))


def gpu_of(spec: RunSpec) -> str | None:
    """The GPU by its name; None for one that has no recipes."""
    name = spec.cluster.device.lower().partition("-")[0]
    return name if name in GPUS else None


def precision_of(spec: RunSpec) -> str | None:
    """The precision by its name; None for a dtype, or a name, that is not among them."""
    names = PRECISIONS.get(spec.training.dtype, ())
    asked = spec.engine_settings.get("precision")
    return next((name for name in names if asked in (None, name)), None)


def _settings(spec: RunSpec) -> Iterator[str]:
    own, checkout = spec.engine_settings, checkout_of(spec)
    if checkout is None or not PurePosixPath(checkout).is_absolute():
        yield (
            "engine_settings.checkout must be the whole path of a checkout of Megatron-Bridge, as "
            "the nodes see it (in NVIDIA's images /opt/Megatron-Bridge)"
        )
    if bool(own.get("family")) != bool(own.get("recipe")):
        yield "engine_settings.family and recipe are of one performance recipe: name both, or none"
    if (library := own.get("library")) not in (None, True, False):
        yield f"engine_settings.library {library} is neither true nor false"
    elif library and ((own.get("entry") or ENTRIES[0]) != ENTRIES[0] or own.get("variant")):
        yield f"engine_settings.library is started by {ENTRIES[0]}, and has no variants"
    elif library and spec.training.dtype != "bf16":
        yield f"dtype {spec.training.dtype} is no library recipe's: it trains in bf16"
    if (entry := own.get("entry")) and entry not in ENTRIES:
        yield f"engine_settings.entry {entry} is neither {' nor '.join(ENTRIES)}"
    if gpu_of(spec) is None:
        yield f"device {spec.cluster.device} has no performance recipes: {', '.join(GPUS)} have"
    if precision_of(spec) is None:
        names = ", ".join(name for names in PRECISIONS.values() for name in names)
        asked = own.get("precision") or "of its own"
        yield f"dtype {spec.training.dtype} with precision {asked} is none of {names}"


def _model(spec: RunSpec) -> Iterator[str]:
    if spec.model.kind != "decoder" or spec.lora is not None:
        yield "a performance recipe is started to pre-train decoders: no diffusion, no adapters"
    elif recipe_of(spec) is None:
        yield (
            f"{spec.recipe} is none of the models whose recipe is known "
            f"({', '.join(name for _, name in RECIPES.values())}): name engine_settings.family and "
            "recipe"
        )


def _layout(spec: RunSpec, recompute: Sequence[Recompute]) -> Iterator[str]:
    layout = spec.layout
    if layout.zero_stage not in (1, 3):
        yield (
            f"layout.zero_stage {layout.zero_stage} has no argument: use 1, the distributed "
            "optimizer, or 3, Megatron-FSDP"
        )
    if layout.dp_shard is not None:
        yield "layout.dp_shard has no argument: states are sharded over all replicas"
    if layout.schedule in ("gpipe", "zero-bubble"):
        yield f"layout.schedule {layout.schedule} has no argument: its pipelines run 1f1b"
    if layout.sequence_parallel != (layout.tp > 1):
        yield "layout.sequence_parallel has no argument: recipes have it with tp > 1, and only then"
    if layout.recompute not in recompute:
        yield (
            f"layout.recompute {layout.recompute} has no argument: use {' or '.join(recompute)}; "
            "with none the recipe recomputes what it does of its own"
        )
    if spec.training.compile != "none":
        yield f"training.compile {spec.training.compile} has no argument: use none"


def _data(spec: RunSpec) -> Iterator[str]:
    data = spec.data
    if data.source != "synthetic" or data.packing != "packed":
        yield (
            f"data.source {data.source} is not handed on: a performance recipe is measured on mock "
            "data (--set data.source=synthetic)"
        )
