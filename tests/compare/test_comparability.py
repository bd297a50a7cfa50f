"""Which settings must be alike before a verdict, and what may be missing."""

from __future__ import annotations

import pytest

from paceline.compare.comparability import COMPARED_SETTINGS, compare_settings, fair_metric
from paceline.core.layout import Layout
from paceline.core.run import RunSettings
from paceline.core.shape import LoraSpec
from tests.example import make_spec

FACTS = RunSettings.of(make_spec())


def with_experts(**fields: object) -> RunSettings:
    assert FACTS.model
    experts = FACTS.model.model_copy(update={"num_experts": 4, "experts_per_token": 2})
    return FACTS.model_copy(update={"model": experts, "routing": "learned from scratch", **fields})


def changed(**fields: object) -> RunSettings:
    return FACTS.model_copy(update=fields)


def test_a_run_is_alike_to_its_repeats():
    alike = compare_settings([FACTS] * 3, [FACTS] * 2)
    assert (alike.differences, alike.unknown, alike.unstated_keys) == ((), (), ())


CHANGES: dict[str, dict[str, object]] = {
    "model": {"model": FACTS.model and FACTS.model.model_copy(update={"num_layers": 3})},
    "lora": {"lora": LoraSpec(rank=8, alpha=16, targets=("q",))},
    "device": {"device": "H100-SXM"},
    "num_devices": {"num_devices": 4},
    "dtype": {"dtype": "bf16"},
    "matmul_precision": {"matmul_precision": "highest"},
    "seq_len": {"seq_len": 64},
    "global_batch": {"global_batch": 16},
    "layout": {"layout": Layout(micro_batch=2)},
    "recompute": {"layout": Layout(micro_batch=4, recompute="full")},
    "data": {"data": "synthetic"},
    "packing": {"packing": "padded"},
    "profiled": {"profiled": True},
}


def test_every_key_is_tried():
    assert {*CHANGES, "routing"} == set(COMPARED_SETTINGS)


def test_the_choice_of_experts_counts_for_models_with_experts_only():
    learned, forced = with_experts(), with_experts(routing="forced")
    assert compare_settings([learned], [forced]).keys == ("routing",)
    pattern = with_experts(routing="pattern:3,1")
    assert compare_settings([forced], [pattern]).keys == ("routing",)
    assert compare_settings([learned], [with_experts(routing=None)]).unstated_by_candidate == (
        "routing",
    )
    assert compare_settings([FACTS], [changed(routing=None)]).unstated_keys == ()


@pytest.mark.parametrize("key", CHANGES)
def test_each_setting_is_looked_at_by_itself(key: str):
    alike = compare_settings([FACTS], [changed(**CHANGES[key])])
    # Another dtype has another matrix-product precision with it.
    assert alike.keys[0] == key and set(alike.keys) <= {key, "matmul_precision"}


@pytest.mark.parametrize(
    "key", [key for key in COMPARED_SETTINGS if key not in ("lora", "recompute", "routing")]
)
def test_a_setting_that_one_side_states_is_assumed_equal(key: str):
    alike = compare_settings([FACTS], [changed(**{key: None})])
    assert key in alike.unstated_by_candidate and alike.keys == ()
    alike = compare_settings([FACTS, changed(**{key: None})], [FACTS])
    assert key in alike.unstated_by_baseline and key in alike.unstated_by_one_side


def test_an_unstated_setting_does_not_hide_a_contradiction():
    silent, other = changed(global_batch=None), changed(global_batch=16)
    alike = compare_settings([FACTS, silent], [other])
    assert alike.keys == ("global_batch",)
    assert compare_settings([changed(profiled=True)], [changed(profiled=None)]).keys == (
        "profiled",
    )


def test_what_is_known_of_neither_is_told_apart():
    alike = compare_settings(
        [changed(data=None, profiled=None)], [changed(data=None, profiled=None)]
    )
    assert (alike.keys, alike.unknown) == ((), ("data", "profiled"))


def test_only_the_parts_that_differ_are_told():
    (difference,) = compare_settings(
        [FACTS], [changed(layout=Layout(micro_batch=4, tp=2))]
    ).differences
    assert (difference.baseline, difference.candidate) == ("tp 1", "tp 2")


def test_a_side_that_mixes_settings_differs_from_everything():
    (difference,) = compare_settings(
        [FACTS, FACTS], [FACTS, changed(dtype="fp16", matmul_precision="highest")]
    ).differences[:1]
    assert difference.key == "dtype" and difference.candidate == "mixed: fp32 / fp16"


def test_two_profiled_sides_are_not_comparable():
    profiled = changed(profiled=True)
    assert compare_settings([profiled], [profiled]).keys == ("profiled",)


def test_the_precision_of_fp32_products_is_nothing_to_smaller_formats():
    ours, theirs = changed(dtype="bf16"), changed(dtype="bf16", matmul_precision=None)
    assert compare_settings([ours], [theirs]).keys == ()


def test_a_schedule_without_a_pipeline_is_no_difference():
    other = Layout(micro_batch=4, schedule="gpipe")
    assert compare_settings([FACTS], [changed(layout=other)]).keys == ()
    deep, deeper = (Layout(pp=2, schedule=s) for s in ("gpipe", "1f1b"))
    assert compare_settings([changed(layout=deep)], [changed(layout=deeper)]).keys == ("layout",)


def test_what_the_loss_counts_is_told_of_padded_samples_alone():
    padded = changed(packing="padded", loss_on="all")
    (difference,) = compare_settings(
        [padded], [changed(packing="padded", loss_on="text")]
    ).differences
    assert (difference.key, difference.baseline, difference.candidate) == (
        "packing",
        "loss_on all",
        "loss_on text",
    )
    assert compare_settings([FACTS], [changed(loss_on="text")]).keys == ()


def test_on_other_devices_batches_may_be_alike_in_all_or_a_device():
    strong, weak = changed(num_devices=4), changed(num_devices=4, global_batch=16)
    odd = changed(num_devices=4, global_batch=12)
    for side, keys, rule in (
        (strong, ("num_devices",), "strong scaling"),
        (weak, ("num_devices",), "weak scaling"),
        (odd, ("num_devices", "global_batch"), "neither"),
    ):
        alike = compare_settings([FACTS], [side], allowed=["num_devices"])
        assert alike.keys == keys and rule in alike.batch_rule
    assert compare_settings([FACTS], [weak]).keys == ("num_devices", "global_batch")


def test_a_published_row_is_asked_for_no_more_than_it_states():
    row = RunSettings(
        model=FACTS.model,
        device="cpu",
        num_devices=2,
        dtype="fp32",
        seq_len=32,
        global_batch=8,
        layout=Layout(tp=1),
    )
    alike = compare_settings([row], [FACTS], published=True)
    assert alike.keys == () and set(alike.unstated_keys) == {
        "matmul_precision",
        "recompute",
        "data",
        "packing",
        "profiled",
    }
    states_more = row.model_copy(update={"layout": Layout(tp=1, micro_batch=8)})
    assert compare_settings([states_more], [FACTS], published=True).keys == ("layout",)
    silent = row.model_copy(update={"dtype": None})
    assert compare_settings([silent], [FACTS], published=True).keys == ("dtype",)
    unknown_dtype, unknown_layout = changed(dtype=None), changed(layout=None)
    assert compare_settings([row], [unknown_dtype], published=True).keys == ("dtype",)
    alike = compare_settings([row], [unknown_layout], published=True)
    assert (alike.keys, alike.unstated_by_candidate) == ((), ("layout",))


@pytest.mark.parametrize(
    ("differing", "metric"),
    [
        ([], "step_time_s"),
        (["dtype", "layout", "device"], "step_time_s"),
        (["num_devices"], "tokens_per_s_per_device"),
        (["global_batch"], "tokens_per_s_per_device"),
        (["seq_len", "global_batch"], "model_flops_per_s_per_device"),
        (["model"], "model_flops_per_s_per_device"),
    ],
)
def test_the_metric_is_one_that_still_means_something(differing: list[str], metric: str):
    name, why = fair_metric(differing)
    assert name == metric and (why is None) == (metric == "step_time_s")
