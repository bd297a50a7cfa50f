"""Every training setting of a full-size recipe is its source's (recipe_sources.yaml)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.shape import has_experts
from paceline.files.recipe import Recipe, load_recipe, recipe_names, recipe_path
from paceline.files.yaml_file import read_document

TABLE: dict[str, Any] = read_document(Path(__file__).parent / "recipe_sources.yaml")
SOURCES: dict[str, str] = TABLE["sources"]
WORKLOADS = [name for name in recipe_names() if f"{name}-tiny" in recipe_names()]
OF_THIS_PROGRAM = {
    "training.matmul_precision",
    "training.compile",
    "training.fp8_recipe",
    "data.source",
}
"""How the native trainer computes, and what stands in for data: no settings of a training."""


def text_of(name: str) -> str:
    """A recipe as it is written."""
    return recipe_path(name).read_text()


def cases() -> Iterator[tuple[str, str | None]]:
    for name in WORKLOADS:
        yield name, None
        for variant in load_recipe(name).variants:
            yield name, variant


def settings(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says of its training, by dotted field; None is nothing said."""
    content = recipe.model_dump(mode="json")
    content["data"] = recipe.data.model_dump(mode="json", exclude_unset=True)
    content["model"] = {k: v for k, v in content["model"].items() if k.endswith("dropout")}
    parts = {key: content[key] for key in ("training", "lora", "data", "model")}
    leaves = {key: value for key, value in _leaves(parts, "") if value is not None}
    unused = [] if recipe.training.dtype == "fp16" else ["training.loss_scale."]
    unused += [] if has_experts(recipe.model) else ["training.rout"]
    biased = recipe.model.kind == "decoder" and recipe.model.router_choice_bias
    unused += [] if biased else ["training.router_bias"]
    further = recipe.model.kind == "decoder" and recipe.model.mtp_layers
    unused += [] if further else ["training.mtp_loss_weight"]
    ignored = {key for key in leaves if key.startswith(tuple(unused))}
    return {key: leaves[key] for key in leaves.keys() - ignored - OF_THIS_PROGRAM}


def _leaves(content: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def of_variant(name: str, variant: str | None) -> dict[str, Any]:
    """The settings of a recipe, or those of a variant in which it differs from the recipe."""
    base = settings(load_recipe(name))
    if variant is None:
        return base
    changed = settings(load_recipe(name, variant))
    return {key: value for key, value in changed.items() if base.get(key) != value}


def stated(name: str, variant: str | None) -> dict[str, Any]:
    """What the sources say of a recipe, by dotted field."""
    by_source = TABLE.get(f"{name} {variant}" if variant else name, {})
    assert set(by_source) <= set(SOURCES)
    rows = [row for fields in by_source.values() for row in fields.items()]
    assert len(rows) == len(dict(rows)), "one source a field"
    return dict(rows)


@pytest.mark.parametrize(("name", "variant"), list(cases()))
def test_every_setting_is_the_number_of_its_source(name: str, variant: str | None):
    assert of_variant(name, variant) == stated(name, variant)


def test_every_section_is_of_a_recipe():
    names = {f"{name} {variant}" if variant else name for name, variant in cases()}
    assert set(TABLE) - {"sources"} <= names
    used = {source for key in set(TABLE) - {"sources"} for source in TABLE[key]}
    assert used == set(SOURCES)


@pytest.mark.parametrize(
    "override", ["training.lr=1e-3", "ramp_up={start: 8, increment: 8, samples: 99}"]
)
def test_another_number_and_a_setting_without_a_source_are_noticed(override: str):
    changed = settings(load_recipe("gpt-1b3", None, [override]))
    assert changed != stated("gpt-1b3", None)


@pytest.mark.parametrize("name", [n for n in WORKLOADS if "lr_schedule:" in text_of(n)])
def test_a_recipe_names_the_upstream_file_of_its_schedule(name: str):
    """Above the learning rate's schedule, as no seed has all of it."""
    text = text_of(name)
    before = text[: text.index("lr_schedule:")].splitlines()
    assert any(line.strip().startswith("#") for line in before[-4:])
