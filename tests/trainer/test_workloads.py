"""Every recipe of this trainer: the model has the size that it should have, and really trains."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape, trainable_parameters
from paceline.engines import native
from paceline.files.events import StartEvent, StepEvent, read_events
from paceline.files.recipe import Recipe, load_recipe, recipe_names, resolve
from paceline.trainer.config import TrainerConfig, parse_config
from paceline.trainer.model.network import count_parameters, freeze
from paceline.trainer.parallel.mesh import Mesh
from paceline.trainer.replica.assembly import layer_setting, make_network
from tests.trainer.example import log, train, world_size

RECIPES = [name for name in recipe_names() if load_recipe(name).engine == "native"]
TINY = [name for name in RECIPES if name.endswith("-tiny")]
ALL = [(name, variant) for name in RECIPES for variant in [None, *load_recipe(name).variants]]
NATIVE = [case for case in ALL if load_recipe(*case).engine == "native"]
"""All but variants that are the settings of another program."""
PER_NODE = 8
LARGER = {"gpt-oss-120b": "gpt-oss-20b-tiny", "qwen3-235b-a22b": "qwen3-30b-a3b-tiny"}
"""Models that are larger ones of another recipe's structure, and that one's tiny variant."""


def cluster_for(recipe: Recipe) -> Cluster:
    """The recipe's cluster: its number of H100, or at least two processes where it needs them."""
    if recipe.devices is None or recipe.name.endswith("-tiny"):
        single = recipe.training.global_batch == recipe.layout.micro_batch
        ranks = recipe.devices or max(1 if single else 2, recipe.layout.smallest_world)
        return Cluster(name="here", device="cpu", devices_per_node=ranks, threads_per_device=1)
    nodes = max(1, recipe.devices // PER_NODE)
    return Cluster(
        name="there", device="H100-SXM", nodes=nodes, devices_per_node=recipe.devices // nodes
    )


def resolved(name: str, variant: str | None = None, *changes: str) -> RunSpec:
    recipe = load_recipe(name, variant, changes)
    return resolve(recipe, cluster_for(recipe), native_bf16=True, variant=variant)


def whole_model(config: TrainerConfig) -> Any:
    """The model of a training, without memory."""
    with torch.device("meta"):
        model = make_network(config.model, layer_setting(config, Mesh()))
    freeze(model)
    return model


def siblings(name: str) -> tuple[Recipe, Recipe]:
    return load_recipe(name.removesuffix("-tiny")), load_recipe(name)


def proportions(shape: DecoderShape) -> tuple[float, float, float]:
    """Query heads a key/value head, and the widths of embedding and ffn relative to the model's."""
    hidden = shape.hidden_size
    return shape.num_heads / shape.kv_heads, shape.embed_dim / hidden, shape.ffn_size / hidden


def test_every_published_workload_has_a_tiny_sibling() -> None:
    named = {name for name in RECIPES if not name.startswith("tiny-")} - set(TINY)

    assert {LARGER.get(name, f"{name}-tiny") for name in named} <= set(TINY)
    assert set(TINY) <= {f"{name}-tiny" for name in recipe_names()}
    assert {
        "opt-350m-sft",
        "opt-13b-sft",
        "llama31-8b",
        "llama31-70b",
        "llama31-405b",
        "llama2-70b-lora",
        "gpt-1b3",
    } <= named


@pytest.mark.parametrize("name", TINY)
def test_a_sibling_keeps_the_structure_of_its_parent(name: str) -> None:
    parent, tiny = siblings(name)
    sizes = {
        "num_layers",
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "head_size",
        "query_pre_attn_scalar",
        "sliding_window",
        "ffn_size",
        "vocab_size",
        "max_positions",
        "embedding_size",
        "num_experts",
        "experts_per_token",
        "expert_groups",
        "groups_per_token",
        "shared_ffn_size",
        "first_dense_layers",
        "dense_ffn_size",
        "latent_attention",
        # The trainer predicts one token.
        "mtp_layers",
        # Tiny variants are compared with other programs number by number, so they drop nothing.
        "dropout",
        "attention_dropout",
    }
    if parent.model.kind != "decoder" or tiny.model.kind != "decoder":
        pytest.skip("a decoder's fields are compared")

    assert parent.model.model_dump(exclude=sizes) == tiny.model.model_dump(exclude=sizes)
    assert proportions(parent.model) == proportions(tiny.model)
    assert (parent.lora is None) == (tiny.lora is None)
    if parent.lora and tiny.lora:
        assert parent.lora.targets == tiny.lora.targets
        assert parent.lora.train_rest == tiny.lora.train_rest
        assert parent.lora.dropout == tiny.lora.dropout
    assert parent.layout.recompute == tiny.layout.recompute
    assert parent.data.packing == tiny.data.packing and parent.data.loss_on == tiny.data.loss_on
    assert parent.flops_convention == tiny.flops_convention


@pytest.mark.parametrize(("name", "variant"), NATIVE)
def test_the_trainer_takes_every_recipe_in_every_variant(name: str, variant: str | None) -> None:
    assert native.unsupported(resolved(name, variant)) == []


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_the_model_has_the_parameters_that_its_recipe_counts(
    name: str, variant: str | None
) -> None:
    spec = resolved(name, variant)
    model = whole_model(parse_config(native.settings(spec)))

    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count_parameters(model) == spec.num_parameters
    assert trained == trainable_parameters(spec.model, spec.lora, spec.layout.tp)


def events(folder: Path, ranks: int) -> Iterator[list[Any]]:
    """Every rank's events."""
    for rank in range(ranks):
        lines = (folder / "steps" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
        yield [*read_events(lines)]


TRAINED_BY_DAY = ("gpt-oss-20b-tiny", "deepseek-v3-tiny")
"""Tiny variants with most of what others have. Further ones are trained by studies and by MLPerf's
trials, and the numerics train every structure."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in TRAINED_BY_DAY else pytest.mark.nightly)
        for name in TINY
    ],
)
def test_a_sibling_trains(tmp_path: Path, name: str) -> None:
    spec = resolved(name, None, "steps=3", "memory_parts=false")
    raw = native.settings(spec)

    assert train(tmp_path, raw) == 0, log(tmp_path)
    for of_rank in events(tmp_path, world_size(raw)):
        start, *steps, _ = of_rank
        assert isinstance(start, StartEvent) and start.num_parameters == spec.num_parameters
        assert [step.step for step in steps if isinstance(step, StepEvent)] == [1, 2, 3]
    shutil.rmtree(tmp_path)
