from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.core.layout import Layout, layout_problems
from tests.shapes import GPT_1B3_PADDED, LLAMA_8B, LLAMA_70B, LLAMA_405B

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
    if layout_problems(layout, LLAMA_70B, world, batch):
        return
    dp = layout.dp(world)
    assert dp * layout.model_devices == world
    assert dp * layout.micro_batch * layout.num_microbatches(world, batch) == batch


def test_nvidias_layout_has_64_micro_batches_at_every_scale():
    for num_devices in (64, 128, 2048):
        assert not layout_problems(NVIDIA_70B, LLAMA_70B, num_devices, 2 * num_devices)
        assert NVIDIA_70B.num_microbatches(num_devices, 2 * num_devices) == 64


@pytest.mark.parametrize(
    ("fields", "world", "batch", "sentence"),
    [
        ({"tp": 4, "pp": 4, "cp": 2}, 48, 96,
         "tp 4 x pp 4 x cp 2 = 32 does not divide 48 devices"),
        ({"micro_batch": 3}, 8, 512,
         "global_batch 512 is not a multiple of dp 8 x micro_batch 3 = 24"),
        ({"tp": 16}, 16, 16, "tp 16 does not divide 8 key/value heads"),
        ({"pp": 3}, 3, 3,
         "pp 3 x vp 1 divides neither 32 layers nor 34 with embedding and head"),
        ({"vp": 2}, 8, 8, "vp 2 needs pp > 1"),
        ({"sequence_parallel": True}, 8, 8, "sequence_parallel needs tp > 1"),
    ],
    ids=["world", "batch", "heads", "layers", "vp", "sequence-parallel"],
)  # fmt: skip
def test_each_rule_is_one_sentence_with_its_numbers(
    fields: dict[str, Any], world: int, batch: int, sentence: str
):
    assert layout_problems(Layout(**fields), LLAMA_8B, world, batch) == [sentence]


def test_all_broken_rules_are_told_at_once():
    problems = layout_problems(Layout(tp=3, pp=5, micro_batch=7), GPT_1B3_PADDED, 15, 16)
    assert len(problems) == 3


def test_megatron_may_count_embedding_and_head_as_layers():
    assert not layout_problems(Layout(pp=8), LLAMA_405B, 8, 8)


def test_a_label_names_dp_and_whatever_is_larger_than_one():
    assert NVIDIA_70B.label(64) == "dp 2 tp 4 pp 4 cp 2 vp 5 zero 1"
    assert Layout().label(8) == "dp 8"


@pytest.mark.parametrize("fields", [{"tp": 0}, {"zero_stage": 4}, {"micro_batch": -1}, {"dp": 2}])
def test_senseless_sizes_are_refused(fields: dict[str, Any]):
    with pytest.raises(ValidationError):
        Layout.model_validate(fields)
