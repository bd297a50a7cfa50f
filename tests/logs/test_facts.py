"""The user's word goes before the log's, and the log's before the recipe's."""

from __future__ import annotations

import pytest

from paceline.core.errors import UserError
from paceline.engines.log_reading.log_content import Fact, LogContent
from paceline.logs.facts import UserSettings, all_facts


def facts(settings: UserSettings, **stated: Fact):
    return all_facts(settings, "megatron", LogContent(facts=stated))[0]


def test_nothing_said_is_nothing_known():
    unsaid = facts(UserSettings())
    assert (unsaid.model, unsaid.device, unsaid.num_devices, unsaid.global_batch) == (None,) * 4
    assert unsaid.layout is None and unsaid.origin == "imported"


def test_user_then_log_then_recipe():
    settings = UserSettings(recipe="llama31-70b", num_devices=128)
    merged = facts(settings, num_devices=64, global_batch=256, dtype="bfloat16")
    assert (merged.num_devices, merged.global_batch, merged.seq_len) == (128, 256, 8192)


def test_a_batch_per_device_needs_the_devices():
    recipe = UserSettings(recipe="opt-350m-sft")
    assert facts(recipe).global_batch is None
    assert facts(recipe, num_devices=8).global_batch == 192


def test_a_model_alone_brings_no_batch_and_no_length():
    merged = facts(UserSettings(model="llama31-70b"))
    assert merged.model is not None and merged.recipe == "llama31-70b"
    assert (merged.seq_len, merged.global_batch, merged.layout) == (None, None, None)


def test_the_logs_layout_overrides_the_recipes_axis_by_axis():
    merged = facts(UserSettings(recipe="llama31-70b"), tp=8, pp=2)
    assert merged.layout is not None
    assert (merged.layout.tp, merged.layout.pp, merged.layout.cp) == (8, 2, 2)


@pytest.mark.parametrize(("name", "value"), [("tp", 0), ("zero_stage", 7), ("pp", -1)])
def test_a_senseless_layout_in_a_log_is_passed_over(name: str, value: int):
    assert facts(UserSettings(), **{name: value}).layout is None


def test_device_and_dtype_names_are_the_catalogs():
    merged = facts(UserSettings(), device="NVIDIA H100 80GB HBM3", dtype="torch.bfloat16")
    assert (merged.device, merged.dtype) == ("H100-SXM", "bf16")
    assert facts(UserSettings(device="h100", dtype="BF16")).device == "H100-SXM"


def test_a_device_that_no_catalog_knows_is_told_and_not_guessed():
    merged, notes = all_facts(
        UserSettings(), "megatron", LogContent(facts={"device": "Abacus 3000"})
    )
    assert merged.device is None and any("Abacus 3000" in note for note in notes)


def test_a_contradiction_is_told():
    _, notes = all_facts(
        UserSettings(global_batch=64), "megatron", LogContent(facts={"global_batch": 128})
    )
    assert notes == ["global batch 64 was given, but the log reports 128"]


@pytest.mark.parametrize(
    "settings",
    [
        UserSettings(model="lama31-8b"),
        UserSettings(recipe="nope"),
        UserSettings(device="H1000"),
        UserSettings(dtype="bf61"),
        UserSettings(convention="casual"),
        UserSettings(engine="megatrom"),
    ],
)
def test_an_unknown_name_is_refused_with_what_is_allowed(settings: UserSettings):
    with pytest.raises(UserError, match=r"unknown|not in") as refused:
        all_facts(settings, settings.engine_name, LogContent())
    assert refused.value.allowed or refused.value.remedy


def test_absurd_numbers_in_a_log_do_no_harm():
    merged = facts(UserSettings(), seq_len=-5, num_devices=0, global_batch=10**30)
    assert (merged.seq_len, merged.num_devices, merged.global_batch) == (None, None, None)


def test_a_layout_that_does_not_fit_on_the_devices_is_left_out_and_told():
    settings = UserSettings(num_devices=8)
    merged, notes = all_facts(settings, "megatron", LogContent(facts={"tp": 4, "pp": 16}))
    assert merged.layout is None and any("64 devices per replica" in note for note in notes)
    assert facts(UserSettings(num_devices=128), tp=4, pp=16).layout is not None


def test_what_a_devices_name_leaves_open_is_told():
    _, notes = all_facts(UserSettings(device="h100"), "megatron", LogContent())
    assert notes and "assuming H100-SXM" in notes[0]
    assert all_facts(UserSettings(device="B200"), "megatron", LogContent())[1] == []


def test_what_was_given_at_an_import_is_still_held_against_the_log():
    imported = facts(UserSettings(num_devices=16))
    _, notes = all_facts(
        UserSettings(facts=imported), "megatron", LogContent(facts={"num_devices": 8})
    )
    assert notes == ["num devices 16 was given, but the log reports 8"]


@pytest.mark.parametrize("rule", ["sometimes", "5:", "skip:", "1:2:3", "-5"])
def test_what_is_no_window_is_refused_before_a_log_is_read(rule: str):
    with pytest.raises(UserError, match="not a window rule"):
        UserSettings(window=rule).check()
    for sound in (None, "auto", "last", "35:44", "skip:5"):
        UserSettings(window=sound).check()


def test_a_log_of_another_model_is_told():
    settings = UserSettings(model="llama31-8b")
    _, notes = all_facts(settings, "megatron", LogContent(facts={"num_parameters": 6_440_000_000}))
    assert notes == [
        "the log's model has 6.44B parameters, the given model has 8.03B: "
        "FLOP/s and MFU do not apply to it"
    ]
    _, same = all_facts(settings, "megatron", LogContent(facts={"num_parameters": 8_030_000_000}))
    assert same == []


def test_padding_is_known_where_a_recipe_states_it():
    merged = facts(UserSettings(recipe="opt-350m-sft"))
    assert (merged.packing, merged.loss_on) == ("padded", "all")
    assert facts(UserSettings(recipe="llama31-70b")).packing is None
    assert facts(UserSettings(model="opt-350m-sft")).packing is None
