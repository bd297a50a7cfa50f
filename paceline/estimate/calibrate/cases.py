"""GEMMs, attention and short training runs that represent a recipe on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import UserError
from paceline.core.hardware import Dtype
from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines import native
from paceline.files.recipe import Recipe, load_recipe, resolve
from paceline.machines.probe.inventory import local_cluster

BATCH = 8
"""Samples per step: eight micro-batches, or one."""
FEW_LAYERS, MORE_LAYERS = 2, 4
"""Layers of the short training runs; the difference of their times is that of a layer."""
DEFAULTS = {"cpu": ("tiny-llama", "gpt-1b3-tiny"), "cuda": ("llama31-8b",)}
Axes = dict[str, Any]


@dataclass(frozen=True)
class ShortTraining:
    """Training run of a few steps."""

    recipe: str
    spec: RunSpec

    @property
    def layout_label(self) -> str:
        """Description of the layout."""
        layout = self.spec.layout
        words = [layout.label(self.spec.world_size), f"micro-batch {layout.micro_batch}"]
        words += [f"{layout.recompute} recomputation"] if layout.recompute != "none" else []
        words += ["sequence parallel"] if layout.sequence_parallel else []
        words += [layout.schedule] if layout.schedule != "1f1b" else []
        return ", ".join(words)

    @property
    def name(self) -> str:
        """Name that is unique among the runs on the same number of ranks."""
        layout = self.spec.layout.model_dump_json()
        return f"{self.recipe} {self.spec.model.num_layers} {layout}"


def short_trainings(
    recipes: Sequence[Recipe],
    machine_inventory: dict[str, Any],
    device: str,
    dtype: Dtype,
    ranks: int,
) -> list[ShortTraining]:
    """Return the short training runs of all recipes on `ranks` ranks that the trainer supports."""
    trainings = [
        short
        for recipe in recipes
        for layers, axes in _layouts(ranks)
        if (
            short := short_training(
                recipe=recipe,
                machine_inventory=machine_inventory,
                device=device,
                dtype=dtype,
                ranks=ranks,
                layers=layers,
                axes=axes,
            )
        )
        is not None
    ]
    return list({short.name: short for short in trainings}.values())


def short_training(
    recipe: Recipe,
    machine_inventory: dict[str, Any],
    device: str,
    dtype: Dtype,
    ranks: int,
    layers: int,
    axes: Axes,
    batch: int = BATCH,
) -> ShortTraining | None:
    """Return a training run with `layers` of the recipe's layers, None if it cannot run."""
    assert isinstance(recipe.model, DecoderShape)
    model = recipe.model.model_copy(update={"num_layers": min(layers, recipe.model.num_layers)})
    training = recipe.training.model_copy(
        update={"global_batch": batch, "batch_per_device": None, "ramp_up": None, "dtype": dtype}
    )
    synthetic = {"source": "synthetic", "path": None, "loss_mask": None, "document_mask": False}
    data = recipe.data.model_copy(update=synthetic)
    short_recipe = recipe.model_copy(
        update={"model": model, "training": training, "data": data, "layout": Layout(**axes)}
    )
    try:
        spec = resolve(
            short_recipe,
            local_cluster(machine_inventory, device, None, ranks),
            dtype == "bf16",
            None,
        )
    except UserError:
        return None
    problems = native.unsupported(spec) + native.emulation_warnings(spec)
    return None if problems else ShortTraining(recipe.name, spec)


def _layouts(ranks: int) -> Iterator[tuple[int, Axes]]:
    """Yield the (layers, layout) of every short training run on `ranks` ranks."""
    share = BATCH // ranks
    if ranks == 1:
        yield FEW_LAYERS, {"micro_batch": 1}
        yield MORE_LAYERS, {"micro_batch": 1, "recompute": "full"}
        yield FEW_LAYERS, {"micro_batch": BATCH}
        yield MORE_LAYERS, {"micro_batch": BATCH}
        return
    yield FEW_LAYERS, {"micro_batch": 1}
    yield MORE_LAYERS, {"micro_batch": max(1, share)}
    yield MORE_LAYERS, {"micro_batch": max(1, share), "zero_stage": 1}
    yield FEW_LAYERS, {"micro_batch": 1, "zero_stage": 2}
    yield MORE_LAYERS, {"micro_batch": max(1, share), "zero_stage": 3}
    yield FEW_LAYERS, {"micro_batch": 1, "zero_stage": 3}
    yield FEW_LAYERS, {"tp": ranks, "micro_batch": 1}
    yield MORE_LAYERS, {"tp": ranks, "micro_batch": BATCH}
    yield FEW_LAYERS, {"pp": min(ranks, FEW_LAYERS), "micro_batch": 1}
    yield MORE_LAYERS, {"pp": min(ranks, FEW_LAYERS), "micro_batch": max(1, share)}
    yield FEW_LAYERS, {"cp": ranks, "micro_batch": BATCH // 2}


def recipes_of(names: Sequence[str], kind: str) -> list[Recipe]:
    """Return the recipes for calibration; raises UserError for a model other than a decoder."""
    recipes = [load_recipe(name) for name in names or DEFAULTS[kind]]
    for recipe in recipes:
        if not isinstance(recipe.model, DecoderShape):
            raise UserError(
                recipe.name,
                "is not a decoder, so it cannot be used for calibration",
                remedy="choose another recipe",
            )
    return recipes


def gemm_sizes(recipes: Sequence[Recipe]) -> list[tuple[int, int, int]]:
    """Return (tokens, outputs, inputs) of every distinct GEMM of a block and of the head.

    Each is listed for one sample's tokens and for a whole batch's.
    """
    sizes = [
        (tokens, n, k)
        for recipe in recipes
        for tokens in (recipe.training.seq_len, BATCH * recipe.training.seq_len)
        for n, k in _matrices(recipe.model)
    ]
    return list(dict.fromkeys(sizes))


def attention_sizes(recipes: Sequence[Recipe]) -> list[tuple[int, int, int, int, int]]:
    """Return (batch, tokens, heads, key/value heads, head dimension) for one sample and a batch."""
    return [
        (
            batch,
            recipe.training.seq_len,
            recipe.model.num_heads,
            recipe.model.kv_heads,
            recipe.model.head_dim,
        )
        for recipe in recipes
        for batch in (1, BATCH)
    ]


def _matrices(model: Any) -> list[tuple[int, int]]:
    heads, kv = model.num_heads * model.head_dim, model.kv_heads * model.head_dim
    up = (2 if model.gated_ffn else 1) * model.ffn_size
    return [
        (heads + 2 * kv, model.hidden_size),
        (model.hidden_size, heads),
        (up, model.hidden_size),
        (model.hidden_size, model.ffn_size),
        (model.padded_vocab(), model.hidden_size),
    ]
