"""The user's word goes before the log's, and the log's before the recipe's."""

from __future__ import annotations

import pytest

from paceline.core.errors import UserError
from paceline.engines.dialect.logged import Fact, Logged
from paceline.logs.facts import Given, all_facts


def facts(given: Given, **said: Fact):
    return all_facts(given, "megatron", Logged(facts=said))[0]


def test_nothing_said_is_nothing_known():
    found = facts(Given())
    assert (found.model, found.device, found.num_devices, found.global_batch) == (None,) * 4
    assert found.layout is None and found.origin == "imported"


def test_user_then_log_then_recipe():
    given = Given(recipe="llama31-70b", num_devices=128)
    found = facts(given, num_devices=64, global_batch=256, dtype="bfloat16")
    assert (found.num_devices, found.global_batch, found.seq_len) == (128, 256, 8192)


def test_a_batch_per_device_needs_the_devices():
    recipe = Given(recipe="opt-350m-sft")
    assert facts(recipe).global_batch is None
    assert facts(recipe, num_devices=8).global_batch == 192


def test_a_model_alone_brings_no_batch_and_no_length():
    found = facts(Given(model="llama31-70b"))
    assert found.model is not None and found.recipe == "llama31-70b"
    assert (found.seq_len, found.global_batch, found.layout) == (None, None, None)


def test_the_logs_layout_overrides_the_recipes_axis_by_axis():
    found = facts(Given(recipe="llama31-70b"), tp=8, pp=2)
    assert found.layout is not None
    assert (found.layout.tp, found.layout.pp, found.layout.cp) == (8, 2, 2)


@pytest.mark.parametrize(("name", "value"), [("tp", 0), ("zero_stage", 7), ("pp", -1)])
def test_a_senseless_layout_in_a_log_is_passed_over(name: str, value: int):
    assert facts(Given(), **{name: value}).layout is None


def test_device_and_dtype_names_are_the_catalogs():
    found = facts(Given(), device="NVIDIA H100 80GB HBM3", dtype="torch.bfloat16")
    assert (found.device, found.dtype) == ("H100-SXM", "bf16")
    assert facts(Given(device="h100", dtype="BF16")).device == "H100-SXM"


def test_a_device_that_no_catalog_knows_is_told_and_not_guessed():
    found, notes = all_facts(Given(), "megatron", Logged(facts={"device": "Abacus 3000"}))
    assert found.device is None and any("Abacus 3000" in note for note in notes)


def test_a_contradiction_is_told():
    _, notes = all_facts(Given(global_batch=64), "megatron", Logged(facts={"global_batch": 128}))
    assert notes == ["global batch 64 was given; the log says 128"]


@pytest.mark.parametrize(
    "given",
    [
        Given(model="lama31-8b"), Given(recipe="nope"), Given(device="H1000"),
        Given(dtype="bf61"), Given(convention="casual"), Given(engine="megatrom"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_what_is_allowed(given: Given):
    with pytest.raises(UserError, match=r"unknown|not in") as refused:
        all_facts(given, given.engine_name, Logged())
    assert refused.value.allowed or refused.value.remedy


def test_absurd_numbers_in_a_log_do_no_harm():
    found = facts(Given(), seq_len=-5, num_devices=0, global_batch=10**30)
    assert (found.seq_len, found.num_devices) == (None, None)


def test_a_layout_that_does_not_fit_on_the_devices_is_left_out_and_told():
    given = Given(num_devices=8)
    found, notes = all_facts(given, "megatron", Logged(facts={"tp": 4, "pp": 16}))
    assert found.layout is None and any("64 devices a replica" in note for note in notes)
    assert facts(Given(num_devices=128), tp=4, pp=16).layout is not None


def test_what_a_devices_name_leaves_open_is_told():
    _, notes = all_facts(Given(device="h100"), "megatron", Logged())
    assert notes and "taken as H100-SXM" in notes[0]
    assert all_facts(Given(device="B200"), "megatron", Logged())[1] == []


def test_what_was_given_at_an_import_is_still_held_against_the_log():
    known = facts(Given(num_devices=16))
    _, notes = all_facts(Given(facts=known), "megatron", Logged(facts={"num_devices": 8}))
    assert notes == ["num devices 16 was given; the log says 8"]


@pytest.mark.parametrize("rule", ["sometimes", "5:", "skip:", "1:2:3", "-5"])
def test_what_is_no_window_is_refused_before_a_log_is_read(rule: str):
    with pytest.raises(UserError, match="no rule for a window"):
        Given(window=rule).check()
    for sound in (None, "auto", "last", "35:44", "skip:5"):
        Given(window=sound).check()


def test_a_log_of_another_model_is_told():
    given = Given(model="llama31-8b")
    _, notes = all_facts(given, "megatron", Logged(facts={"num_parameters": 6_440_000_000}))
    assert notes == [
        "the log's model has 6.44B parameters, the one named has 8.03B: "
        "FLOP/s and MFU are of another model"
    ]
    _, same = all_facts(given, "megatron", Logged(facts={"num_parameters": 8_030_000_000}))
    assert same == []


def test_padding_is_known_where_a_recipe_states_it():
    found = facts(Given(recipe="opt-350m-sft"))
    assert (found.packing, found.loss_on) == ("padded", "all")
    assert facts(Given(recipe="llama31-70b")).packing is None
    assert facts(Given(model="opt-350m-sft")).packing is None
