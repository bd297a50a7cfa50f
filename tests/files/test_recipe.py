"""Recipes: every shipped one resolves, and what is wrong is said with place and remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.core.secrets import redact
from paceline.core.value import FieldMark, marked_fields
from paceline.engines import native
from paceline.files.recipe import (
    load_recipe,
    override_keys,
    parse_override,
    recipe_names,
    recipe_path,
    resolve,
)

CPU = Cluster(name="here", device="cpu", devices_per_node=2)

MINIMAL = """
name: mine
title: Mine
model: {num_layers: 2, hidden_size: 64, num_heads: 4, ffn_size: 128, vocab_size: 512}
training: {seq_len: 64, batch_per_device: 4, steps: 10}
layout: {micro_batch: 4}
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_resolves_on_the_devices_it_names(name: str):
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.description
    spec = resolve(
        recipe, CPU.model_copy(update={"devices_per_node": recipe.devices or 2}), True, None
    )
    assert spec.layout.num_microbatches(spec.world_size, spec.training.global_batch) >= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("layout.mikro_batch: 1", "layout.mikro_batch: is not a field .* 'layout.micro_batch'"),
        ("layout: {micro_bach: 1}", "layout: layout.micro_bach: is not a known field; allowed: cp"),
        ("layout.tp: 0", "layout.tp: 0 is too small; allowed: a number above 0"),
    ],
)
def test_a_wrong_variant_is_refused_with_its_line_before_it_is_used(
    tmp_path: Path, change: str, words: str
):
    path = tmp_path / "mine.yaml"
    text = recipe_path("tiny-gpt").read_text()
    path.write_text(f"{text}variants:\n  good: {{training.steps: 3}}\n  bad:\n    {change}\n")
    line = path.read_text().count("\n")
    with pytest.raises(UserError, match=f"mine.yaml:{line}: variants.bad.{words}"):
        load_recipe(str(path))


@pytest.mark.parametrize("name", recipe_names())
def test_every_variant_applies(name: str):
    for variant in load_recipe(name).variants:
        assert load_recipe(name, variant) != load_recipe(name)


def test_the_seven_decisive_recipes_are_there():
    assert {"tiny-llama", "tiny-gpt", "tiny-opt", "llama31-70b", "opt-13b-sft", "gpt-1b3"} <= set(
        recipe_names()
    )


def test_a_recipe_file_by_path(tmp_path: Path):
    assert load_recipe(write(tmp_path, MINIMAL)).name == "mine"


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (("steps: 10", "stpes: 10"), 5, ["training.stpes", "did you mean 'steps'"]),
        (("num_heads: 4", "num_heads: 5"), 4, ["not a multiple of num_heads 5"]),
        (("micro_batch: 4", "zero_stage: 7"), 6, ["layout.zero_stage", "0, 1, 2, 3"]),
        (("seq_len: 64", "seq_len: many"), 5, ["training.seq_len: 'many' is not a whole number"]),
        (("steps: 10", "steps: 10, global_batch: 8"), 5, ["exactly one of global_batch"]),
        (("title: Mine", "title: Mine\ntitle: Yours"), 4, ['duplicate key "title"; keep one']),
        (("title: Mine", "title: [Mine"), None, ["is not YAML"]),
    ],
)
def test_a_wrong_file_is_answered_with_line_and_remedy(
    tmp_path: Path, change: tuple[str, str], line: int | None, words: list[str]
):
    path = write(tmp_path, MINIMAL.replace(*change))
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}:" if line else f"{path}:")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "content",
    [b"", b"- a\n", b"\xff\xfe\x00", b"{{{{", b"a: &x [*x]", b"a: 2020-13-45", b"[" * 5000],
)
def test_a_file_that_is_not_a_recipe_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError):
        load_recipe(str(path))


@given(st.text(max_size=200))
def test_any_text_gives_a_recipe_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
):
    path = tmp_path_factory.mktemp("r") / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError):
        load_recipe(str(path))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'tiny-llama'"):
        recipe_path("tiny-lama")


def test_overrides_apply_in_order_and_by_short_name():
    recipe = load_recipe("tiny-llama", None, ["steps=20", "training.steps=30", "zero_stage=3"])
    assert (recipe.training.steps, recipe.layout.zero_stage) == (30, 3)


def test_a_short_name_stays_the_trainings_where_another_part_has_it_too(
    monkeypatch: pytest.MonkeyPatch,
):
    keys = [*override_keys(), "lora.lr"]
    monkeypatch.setattr("paceline.files.recipe.override_keys", lambda: keys)
    assert parse_override("lr=1e-3")[0] == "training.lr"


@pytest.mark.parametrize(
    "batch", ["0", "-4", "1.5", "1e30", "1152921504606846976", ".nan", "abc", "16 per rack"]
)
def test_the_error_about_an_invalid_batch_states_the_allowed_values(batch: str):
    with pytest.raises(UserError) as refused:
        load_recipe("tiny-llama", None, [f"training.global_batch={batch}"])
    said = (
        "training.global_batch: must be a whole number from 1 to 9,007,199,254,740,992, "
        "or like `16 per node`"
    )
    assert said in str(refused.value) and "more)" not in str(refused.value)


def test_giving_a_global_batch_replaces_the_batch_per_device():
    recipe = load_recipe("tiny-llama", None, ["global_batch=32"])
    assert (recipe.training.global_batch, recipe.training.batch_per_device) == (32, None)


@pytest.mark.parametrize("key", override_keys())
def test_every_field_can_be_named_by_an_override(key: str):
    assert parse_override(f"{key}=1")[0] == key


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stpes=3", "did you mean 'steps'"),
        ("steps", "is not key=value"),
        ("steps=abc", "training.steps"),
        ("dtype=bf61", "did you mean 'bf16'"),
        ("steps=[", "the value is not YAML"),
        ("steps=0", "training.steps: 0 is too small; allowed: a number above 0"),
        ("layout.tp=two", "layout.tp: 'two' is not a whole number; allowed: a whole number"),
        ("lora=abc", "lora: 'abc' is not a mapping; allowed: fields: alpha, dropout, lr, "),
        ("engine_settings.x=[1]", "engine_settings.x: a list is not valid; allowed: true or false"),
        ("global_batch=1.5", "training.global_batch: must be a whole number from 1 to 9,007"),
        ("global_batch=[1]", "training.global_batch: must be a whole number from 1 to 9,007"),
        ("steps=2020-13-45", "the value is not YAML"),
        ("betas=[0.9,1.5]", "training.betas.1: 1.5 is too large; allowed: a number below 1"),
    ],
)
def test_a_wrong_override_is_answered(text: str, words: str):
    with pytest.raises(UserError) as caught:
        load_recipe("tiny-llama", None, [text])
    assert f"--set {text.partition('=')[0]}" in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("field", ["steps", "dtype", "global_batch"])
def test_no_part_of_a_secret_is_repeated_in_an_error(field: str, monkeypatch: pytest.MonkeyPatch):
    secret = f"Zq7{'x1Y' * 20}w"
    monkeypatch.setenv("MY_TOKEN", secret)
    for value in (secret, f"eyJhbGciOiJIUzI1NiJ9.{'a1B2' * 20}.{'c3D4' * 11}"):
        with pytest.raises(UserError) as caught:
            load_recipe("tiny-llama", None, [f"{field}={value}"])
        assert value[:5] not in redact(str(caught.value), os.environ)


def test_yaml_numbers_in_exponent_form_are_numbers():
    assert load_recipe("tiny-llama", None, ["total_tokens=1e12"]).training.total_tokens == 1e12


def test_auto_dtype_follows_the_device():
    recipe = load_recipe("tiny-llama")
    assert resolve(recipe, CPU, True, None).training.dtype == "bf16"
    assert resolve(recipe, CPU, False, None).training.dtype == "fp32"


def test_float8_on_a_gpu_compiles_the_blocks():
    recipe = load_recipe("tiny-llama", None, ["dtype=fp8"])
    gpu = CPU.model_copy(update={"device": "H100-SXM"})
    assert resolve(recipe, gpu, True, None).training.compile == "blocks"
    assert resolve(recipe, CPU, True, None).training.compile == "none"


def test_a_layout_that_does_not_fit_the_devices_is_refused_with_reasons():
    recipe = load_recipe("tiny-llama", None, ["layout.tp=3"])
    with pytest.raises(UserError, match="does not divide 2 devices") as caught:
        resolve(recipe, CPU, True, None)
    # Each verb has its own option for them.
    assert "--set, or the number of devices" in str(caught.value)


def test_numbers_that_overflow_are_refused():
    recipe = load_recipe("tiny-llama", None, ["training.batch_per_device=9e15"])
    with pytest.raises(UserError, match=r"has a global batch of 18,\d+.*; allowed: at most 9,007"):
        resolve(recipe, CPU, True, None)
    for name, field in (("tiny-llama", "num_layers"), ("flux1-schnell", "num_single_blocks")):
        with pytest.raises(UserError, match=rf"{field}: [\d.]+ is too large"):
            load_recipe(name, None, [f"{field}=1e10"])


def test_a_layout_is_set_by_the_names_of_its_axes():
    layout = load_recipe("tiny-llama", None, ["tp=2", "pp=2", "schedule=zero-bubble"]).layout
    assert (layout.tp, layout.pp, layout.schedule) == (2, 2, "zero-bubble")


def test_a_sequence_that_cannot_be_cut_is_refused():
    recipe = load_recipe("tiny-llama", None, ["cp=2", "seq_len=250"])
    with pytest.raises(UserError, match="seq_len 250 cannot be split into 2 x cp = 4 chunks"):
        resolve(recipe, CPU, True, None)


def test_the_key_follows_the_content_and_not_the_name():
    recipe = load_recipe("tiny-llama")
    spec = resolve(recipe, CPU, True, None)
    renamed = resolve(recipe.model_copy(update={"name": "other"}), CPU, True, None)
    elsewhere = CPU.model_copy(update={"name": "other", "device_memory_bytes": 1e9})
    assert resolve(recipe, elsewhere, True, None).key == spec.key
    longer = resolve(load_recipe("tiny-llama", None, ["steps=61"]), CPU, True, None)
    assert spec.key == renamed.key != longer.key
    stored = spec.model_dump(mode="json", exclude_defaults=True)
    assert RunSpec.model_validate(stored).key == spec.key


def test_labels_are_declared_with_the_fields():
    labels = marked_fields(RunSpec, FieldMark.LABEL)
    assert {"recipe", "variant", "references", "time_limit_s", "cluster"} < {*labels}
    assert {"name", "hosts", "launcher", "slurm"} < {*labels["cluster"]}
    assert not {"model", "training", "layout", "data", "checkpoint"} & {*labels}


def ramped(*changes: str) -> RunSpec:
    recipe = load_recipe("gpt-1b3-tiny", None, changes)
    return resolve(recipe, CPU, True, None)


def test_a_ramp_up_can_be_set_and_removed_as_a_whole():
    ramped_up = load_recipe("tiny-gpt", None, ["ramp_up={start: 4, increment: 4, samples: 99}"])
    assert ramped_up.training.ramp_up is not None and ramped_up.training.ramp_up.samples == 99
    assert load_recipe("gpt-1b3-tiny", None, ["ramp_up=null"]).training.ramp_up is None
    assert load_recipe("gpt-1b3", "ramp-up").training.ramp_up is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("ramp_up.start=3", "from 3 in steps of 4 the batch never reaches global_batch 16"),
        ("ramp_up.start=16", "from 16 in steps of 4 the batch never reaches global_batch 16"),
        ("ramp_up.increment=5", "it must be above start by a multiple of increment"),
        ("micro_batch=4", "global_batch 4 is not a multiple of dp 2 x micro_batch 4"),
    ],
)
def test_a_ramp_up_that_cannot_run_is_refused_when_the_recipe_is_resolved(change: str, words: str):
    with pytest.raises(UserError) as caught:
        ramped(f"training.{change}" if change.startswith("ramp_up") else change)
    assert "training.ramp_up: " in str(caught.value) and words in str(caught.value)


def test_every_batch_of_a_ramp_up_must_suit_the_pipeline():
    small = ["training.ramp_up={start: 2, increment: 2, samples: 99}", "micro_batch=2", "pp=2"]
    assert native.unsupported(ramped(*small)) == []
    (problem,) = native.unsupported(ramped(*small, "vp=2"))
    assert problem.startswith("while the batch ramps up: 7 micro-batches a step cannot be split")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_and_variant_counts_flops_in_the_default_convention(name: str):
    """Models without a causal mask have one convention only."""
    for variant in (None, *load_recipe(name).variants):
        recipe = load_recipe(name, variant)
        allowed = recipe.model.conventions
        assert recipe.flops_convention == (allowed[0] if allowed else "causal")
