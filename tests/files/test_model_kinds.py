"""Error messages for mistakes in recipes of both kinds of model."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.mmdit import MMDiTShape
from paceline.core.shape import DecoderShape
from paceline.files.recipe import load_recipe, override_keys, recipe_path

FLUX, LLAMA = "flux1-schnell-tiny", "tiny-llama"


def changed(folder: Path, recipe: str, old: str, new: str) -> str:
    """A copy of a recipe with one line changed."""
    text = recipe_path(recipe).read_text()
    assert old in text
    path = folder / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    return str(path)


def test_a_model_without_a_kind_is_a_decoder() -> None:
    assert isinstance(load_recipe(LLAMA).model, DecoderShape)
    assert isinstance(load_recipe(FLUX).model, MMDiTShape)


@pytest.mark.parametrize(
    ("recipe", "old", "new", "message"),
    [
        (FLUX, "num_heads: 4", "num_head: 4", "model.num_head: is not a known field"),
        (FLUX, "num_heads: 4", "num_head: 4", "num_double_blocks"),
        (FLUX, "num_heads: 4", "num_kv_heads: 4", "model.num_kv_heads: is not a known field"),
        (FLUX, "kind: mmdit", "kind: mmdt", "kind is neither decoder nor mmdit"),
        (FLUX, "text_len: 32", "text_len: -1", "model.text_len: "),
        (FLUX, "seq_len: 96", "seq_len: 128", "image tokens, 96"),
        (FLUX, "full-attention", "causal", "flops_convention must be full-attention"),
        (LLAMA, "num_heads: 8", "num_head: 8", "model.num_head: is not a known field"),
        (LLAMA, "num_heads: 8", "num_head: 8", "num_kv_heads"),
        (LLAMA, "activation: silu", "activation: tanh", "'tanh' is not one of the choices"),
        (LLAMA, "num_layers: 4", "text_len: 4", "model.text_len: is not a known field"),
    ],
)
def test_a_mistake_names_its_field_and_what_this_kind_allows(
    tmp_path: Path, recipe: str, old: str, new: str, message: str
) -> None:
    with pytest.raises(UserError) as raised:
        load_recipe(changed(tmp_path, recipe, old, new))

    assert message in str(raised.value)


def test_a_mistake_names_its_line(tmp_path: Path) -> None:
    path = changed(tmp_path, FLUX, "num_heads: 4", "num_head: 4")
    line = 1 + Path(path).read_text().splitlines().index("  num_head: 4")

    with pytest.raises(UserError, match=rf"mine\.yaml:{line}: "):
        load_recipe(path)


def test_fields_of_both_kinds_can_be_set() -> None:
    assert {"model.num_double_blocks", "model.num_kv_heads"} <= set(override_keys())
    assert load_recipe(FLUX, None, ["num_single_blocks=5"]).model.num_layers == 7
