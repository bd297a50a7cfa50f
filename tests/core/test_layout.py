from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.core.axes import AXES
from paceline.core.axes.axis import Rule, refuse
from paceline.core.layout import Layout
from paceline.core.layout_checks import (
    RULES,
    features,
    layout_problems,
    native_problems,
    violated_rules,
)
from paceline.core.parallel_run import ParallelRun
from paceline.core.pipeline import stage_sizes
from paceline.files.recipe import load_recipe
from tests.core.refused import CASES, features_of, layout_of, named
from tests.core.shapes import FLUX, GPT_1B3, GPT_1B3_PADDED, LLAMA_8B, LLAMA_70B, LLAMA_405B

NVIDIA_70B = Layout(tp=4, pp=4, cp=2, vp=5, zero_stage=1, sequence_parallel=True)

sizes = st.integers(1, 8)
layouts = st.builds(Layout, tp=sizes, pp=sizes, cp=sizes, micro_batch=st.integers(1, 16))


@given(layout=layouts, replicas=st.integers(1, 512))
def test_replicas_times_the_devices_of_one_are_the_world(layout: Layout, replicas: int):
    world = replicas * layout.model_devices
    assert layout.dp(world) * layout.model_devices == world


@given(layout=layouts, replicas=st.integers(1, 64), accumulation=st.integers(1, 64))
def test_micro_batches_of_all_replicas_are_the_global_batch(
    layout: Layout, replicas: int, accumulation: int
):
    world = replicas * layout.model_devices
    batch = replicas * layout.micro_batch * accumulation
    assert layout.num_microbatches(world, batch) == accumulation


@given(layout=layouts, world=st.integers(1, 512), batch=st.integers(1, 2048))
def test_a_layout_without_problems_uses_every_device_and_every_sample(
    layout: Layout, world: int, batch: int
):
    if layout_problems(ParallelRun(layout, LLAMA_70B, world, batch)):
        return
    dp = layout.dp(world)
    assert dp * layout.model_devices == world
    assert dp * layout.micro_batch * layout.num_microbatches(world, batch) == batch


@given(layout=layouts, dp_shard=st.sampled_from([None, 1, 2, 3, 4, 6]))
def test_the_smallest_world_holds_whole_replicas_and_whole_shards(
    layout: Layout, dp_shard: int | None
):
    layout = layout.model_copy(update={"dp_shard": dp_shard, "zero_stage": 3})
    world = layout.smallest_world
    assert world % layout.model_devices == 0
    ranks = layout.dp(world) * layout.cp
    assert ranks % layout.shards(layout.dp(world)) == 0
    assert not any(
        "dp_shard" in p for p in layout_problems(ParallelRun(layout, LLAMA_405B, world, world))
    )


def test_nvidias_layout_has_64_micro_batches_at_every_scale():
    for num_devices in (64, 128, 2048):
        assert not layout_problems(
            ParallelRun(NVIDIA_70B, LLAMA_70B, num_devices, 2 * num_devices, 8192)
        )
        assert not native_problems(ParallelRun(NVIDIA_70B, LLAMA_70B, num_devices, 2 * num_devices))
        assert NVIDIA_70B.num_microbatches(num_devices, 2 * num_devices) == 64


@pytest.mark.parametrize(
    ("fields", "world", "batch", "words"),
    [
        ({"tp": 4, "pp": 4, "cp": 2}, 48, 96, "tp 4 x pp 4 x cp 2 = 32 does not divide 48 devices"),
        (
            {"micro_batch": 3},
            8,
            512,
            "global_batch 512 is not a multiple of dp 8 x micro_batch 3 = 24",
        ),
        ({"tp": 64}, 64, 64, "32 query and 8 key/value heads cannot be split over tp 64"),
        (
            {"tp": 8, "cp": 8, "cp_exchange": "all-to-all"},
            64,
            64,
            "32 query heads cannot be split over tp 8 x cp 8 = 64",
        ),
        ({"cp": 3}, 3, 3, "seq_len 8192 cannot be split into 2 x cp = 6 chunks"),
        (
            {"pp": 3},
            3,
            3,
            "32 layers (or 34 with embedding and head) cannot be split over pp 3 x vp 1 = 3 stages",
        ),
        (
            {"dp_shard": 3, "zero_stage": 3},
            8,
            8,
            "dp x cp = 8 ranks cannot be split into groups of dp_shard 3",
        ),
        (
            {"dp_shard": 2, "zero_stage": 3},
            1,
            1,
            "dp x cp = 1 rank cannot be split into groups of dp_shard 2",
        ),
    ],
    ids=["world", "batch", "heads", "all-to-all", "chunks", "layers", "shards", "one rank"],
)
def test_each_condition_is_one_sentence_with_its_numbers(
    fields: dict[str, Any], world: int, batch: int, words: str
):
    (problem,) = layout_problems(ParallelRun(Layout(**fields), LLAMA_8B, world, batch, 8192))
    assert problem.startswith(words)


def test_the_feed_forward_layer_and_the_sequence_are_split_evenly():
    odd = LLAMA_8B.model_copy(update={"ffn_size": 14337})
    (problem,) = layout_problems(ParallelRun(Layout(tp=2), odd, 2, 2))
    assert problem.startswith("ffn_size 14337 cannot be split over tp 2")
    spread = Layout(tp=8, cp=2, sequence_parallel=True)
    (problem,) = layout_problems(ParallelRun(spread, LLAMA_8B, 16, 16, 8200))
    assert problem.startswith("seq_len 8200 cannot be split over tp 8 x cp 2 = 16")
    assert not layout_problems(ParallelRun(spread, LLAMA_8B, 16, 16, 8192))
    assert not layout_problems(ParallelRun(spread, LLAMA_8B, 16, 16))


@pytest.mark.parametrize(
    ("fields", "num_microbatches", "fits"),
    [
        ({"pp": 4}, 4, True),
        ({"pp": 4}, 3, True),
        ({"pp": 4, "schedule": "gpipe"}, 1, True),
        ({"pp": 4, "vp": 2}, 3, True),
        ({"pp": 4, "vp": 2}, 8, True),
        ({"pp": 4, "vp": 2}, 9, False),
        ({"pp": 4, "vp": 2, "schedule": "gpipe"}, 9, True),
        ({"pp": 4, "schedule": "zero-bubble"}, 10, True),
        ({"pp": 4, "schedule": "zero-bubble"}, 13, False),
        ({}, 1, True),
    ],
)
def test_a_schedule_asks_for_micro_batches(
    fields: dict[str, Any], num_microbatches: int, fits: bool
):
    layout = Layout(**fields)
    problems = native_problems(
        ParallelRun(layout, LLAMA_8B, layout.model_devices, num_microbatches)
    )
    assert [f"{num_microbatches} micro-batches a step" in p for p in problems] == [True] * (
        not fits
    )
    assert not layout_problems(
        ParallelRun(layout, LLAMA_8B, layout.model_devices, num_microbatches)
    )


def test_only_the_native_trainer_asks_for_a_key_and_value_head_on_every_tensor_rank():
    assert not layout_problems(ParallelRun(Layout(tp=16), LLAMA_8B, 16, 16))
    (problem,) = native_problems(ParallelRun(Layout(tp=16), LLAMA_8B, 16, 16))
    assert problem.startswith("8 key/value heads cannot be split over tp 16")
    uneven = LLAMA_8B.model_copy(update={"num_heads": 24, "num_kv_heads": 8, "head_size": 128})
    (problem,) = layout_problems(
        ParallelRun(Layout(tp=12, pp=1), uneven.model_copy(update={"ffn_size": 12}), 12, 12)
    )
    assert "24 query and 8 key/value heads cannot be split over tp 12" in problem


@pytest.mark.parametrize(("width", "fits"), [(8, True), (256, True), (20, False), (264, False)])
def test_a_ring_on_a_gpu_takes_heads_that_flash_attention_takes(width: int, fits: bool):
    shape = LLAMA_8B.model_copy(update={"head_size": width})
    ring = Layout(cp=2, cp_exchange="ring")
    problems = native_problems(ParallelRun(ring, shape, 2, 2, dtype="bf16", device="cuda"))
    assert [p.startswith(f"heads {width} wide") for p in problems] == [True] * (not fits)
    for layout, device in ((ring, "cpu"), (ring, None), (Layout(cp=2), "cuda")):
        assert not native_problems(ParallelRun(layout, shape, 2, 2, dtype="bf16", device=device))


def test_tensor_ranks_share_the_padded_vocabulary():
    (problem,) = native_problems(ParallelRun(Layout(tp=2), GPT_1B3, 2, 2))
    assert "a vocabulary of 50257 rows cannot be split over tp 2" in problem
    assert not native_problems(ParallelRun(Layout(tp=2), GPT_1B3_PADDED, 2, 2))
    assert not layout_problems(ParallelRun(Layout(tp=2), GPT_1B3, 2, 2))


def test_all_problems_are_told_at_once():
    problems = layout_problems(
        ParallelRun(Layout(tp=3, pp=5, micro_batch=7), GPT_1B3_PADDED, 15, 16)
    )
    assert len(problems) == 4


def test_megatron_may_count_embedding_and_head_as_layers():
    assert not layout_problems(ParallelRun(Layout(pp=8), LLAMA_405B, 8, 8))


def test_a_label_names_dp_and_whatever_is_larger_than_one():
    assert NVIDIA_70B.label(64) == "dp 2 tp 4 pp 4 cp 2 vp 5 zero 1"
    assert Layout().label(8) == "dp 8"


def test_a_full_label_names_micro_batch_and_recomputation_too():
    assert Layout(tp=2, micro_batch=4).full_label(8) == "dp 4 tp 2 micro-batch 4"
    kept = Layout(recompute="budget", recompute_budget=0.5)
    assert kept.full_label(2) == "dp 2 micro-batch 1 recompute budget 0.5"


@pytest.mark.parametrize("fields", [{"tp": 0}, {"zero_stage": 4}, {"micro_batch": -1}, {"dp": 2}])
def test_senseless_sizes_are_refused(fields: dict[str, Any]):
    with pytest.raises(ValidationError):
        Layout.model_validate(fields)


def test_1f1b_over_several_chunks_is_the_interleaved_schedule():
    assert Layout(pp=2, vp=2).effective_schedule == "interleaved"
    assert Layout(pp=2).effective_schedule == "1f1b"
    assert Layout(pp=2, vp=2, schedule="zero-bubble").effective_schedule == "zero-bubble"


def test_features_name_what_a_layout_combines():
    assert features(ParallelRun(NVIDIA_70B, LLAMA_70B, 64)) == {
        "dp",
        "tp",
        "sp",
        "pp",
        "vp",
        "interleaved",
        "cp",
        "all-gather",
        "zero1",
        *(f"no-{axis.name}" for axis in AXES if axis.name not in ("dp", "tp", "pp", "cp", "vp")),
    }
    assert features(ParallelRun(Layout(), LLAMA_8B, 1)) == {
        "zero0",
        *(f"no-{axis.name}" for axis in AXES),
    }
    hybrid = features(
        ParallelRun(
            Layout(zero_stage=3, dp_shard=2, recompute="full"),
            GPT_1B3,
            4,
            dtype="bf16",
            device="cpu",
            compiled=True,
        )
    )
    assert hybrid >= {"zero3", "dp-shard", "hybrid", "full", "bf16", "cpu", "compile", "tied", "dp"}
    assert "hybrid" not in features(ParallelRun(Layout(zero_stage=3, dp_shard=4), LLAMA_8B, 4))


@pytest.mark.parametrize(("rule", "fields"), CASES, ids=[named(rule) for rule, _ in CASES])
def test_every_rule_is_broken_by_some_layout_that_breaks_no_other(
    rule: Rule, fields: dict[str, Any]
):
    layout, others = layout_of(fields), features_of(fields)
    shape = FLUX if fields.get("kind") == "mmdit" else LLAMA_8B
    if fields.get("kind") == "experts":
        shape = LLAMA_8B.model_copy(update={"num_experts": 2})
    assert violated_rules(features(ParallelRun(layout, shape, 2, **others))) == [rule]
    everywhere = layout_problems(ParallelRun(layout, shape, 2, 16, 8192))
    natively = native_problems(ParallelRun(layout, shape, 2, 16, **others))
    assert (everywhere, natively) == (([], [rule.reason]) if rule.native else ([rule.reason], []))


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_a_reason_teaches_and_names_a_way_out(rule: Rule):
    assert re.search(r", because .+[:;] (set|use) ", rule.reason)
    assert not rule.reason.endswith(".") and "\n" not in rule.reason


def test_one_more_refusal_is_one_more_line():
    rules = (*RULES, refuse("tp", "zero3", why="no"))
    present = features(ParallelRun(Layout(tp=2, zero_stage=3), LLAMA_8B, 4))
    assert [r.reason for r in violated_rules(present, rules)] == ["no"]


@pytest.mark.parametrize(("cp", "fits"), [(1, True), (2, True), (64, True), (3, False)])
def test_both_streams_of_an_mmdit_are_split_over_context_ranks(cp: int, fits: bool):
    problems = layout_problems(ParallelRun(Layout(cp=cp), FLUX, cp, 1, FLUX.seq_len))

    assert problems == [] if fits else "256 text and 256 image tokens" in problems[0]


@pytest.mark.parametrize(("tp", "fits"), [(2, True), (8, True), (16, False)])
def test_an_mmdit_is_cut_by_whole_heads(tp: int, fits: bool):
    assert (layout_problems(ParallelRun(Layout(tp=tp), FLUX, tp, 1, FLUX.seq_len)) == []) is fits


def test_a_layer_for_a_further_token_is_counted_before_the_head():
    assert stage_sizes(61, 8, 4, mtp_layers=1) == [1, *[2] * 30, 0]
    assert stage_sizes(61, 4, 1, mtp_layers=1) == [15, 16, 16, 14]
    assert stage_sizes(61, 7, 1, mtp_layers=1) == [8, *[9] * 5, 8], "61 + 2 come first"
    for layers, stages in ((0, 4), (1, 64), (1, 5)):
        with pytest.raises(ValueError, match="cannot be split"):
            stage_sizes(61, stages, 1, mtp_layers=layers)


def test_stages_of_deepseek_are_those_of_64_slots():
    model = load_recipe("deepseek-v3").model
    cut = Layout(tp=2, pp=8, vp=4, ep=64, zero_stage=1, sequence_parallel=True)
    assert layout_problems(ParallelRun(cut, model, 1024, 16384, 4096)) == []
    (problem,) = layout_problems(
        ParallelRun(cut.model_copy(update={"vp": 3}), model, 1024, 16384, 4096)
    )
    assert "63 with embedding and head, or 64 with multi-token prediction layers too" in problem
    (problem,) = layout_problems(
        ParallelRun(cut.model_copy(update={"vp": 8}), model, 1024, 16384, 4096)
    )
    assert "the last one is too small for the multi-token prediction layers" in problem
