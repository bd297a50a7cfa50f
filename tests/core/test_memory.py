from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.hardware import Dtype
from paceline.core.layout import Layout, Recompute
from paceline.core.memory import (
    MAX_DEVICES,
    memory_per_device,
    min_devices_to_fit,
)
from paceline.core.pipeline import stage_sizes
from paceline.core.recompute import saved_activations_per_token
from paceline.core.shape import DecoderShape, num_parameters, parameter_parts, trainable_parameters
from paceline.core.units import GIB, MIB
from paceline.files.recipe import load_recipe
from tests.core.shapes import (
    GPT_1B3,
    GPT_1B3_PADDED,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    OPT_13B,
    OPT_13B_LORA,
    OPT_350M,
    TINY,
    run_of,
)

ZeroStage = Literal[0, 1, 2, 3]
LEAN = Layout(zero_stage=3, recompute="full")


@pytest.mark.parametrize("shape", [LLAMA_8B, OPT_350M, GPT_1B3, TINY])
def test_states_take_16_bytes_a_parameter(shape: DecoderShape):
    assert memory_per_device(run_of(shape, Layout(), 1, 128, "bf16")).states_bytes == pytest.approx(
        16 * num_parameters(shape)
    )


def test_llama_8b_needs_119_6_gib_for_its_states():
    states = memory_per_device(run_of(LLAMA_8B, Layout(), 8, 8192, "bf16")).states_bytes
    assert states / GIB == pytest.approx(119.66, abs=0.01)


@pytest.mark.parametrize(("zero_stage", "bytes_per_parameter"), [(0, 16), (1, 9), (2, 2), (3, 2)])
def test_each_zero_stage_shards_what_it_names(zero_stage: ZeroStage, bytes_per_parameter: int):
    memory = memory_per_device(run_of(LLAMA_8B, Layout(zero_stage=zero_stage), 8, 128, "bf16"))
    assert memory.states_bytes == pytest.approx(bytes_per_parameter * num_parameters(LLAMA_8B))


def test_zero_shards_over_context_parallel_ranks_as_well():
    with_cp = memory_per_device(run_of(LLAMA_8B, Layout(zero_stage=3, cp=2), 4, 8192, "bf16"))
    without = memory_per_device(run_of(LLAMA_8B, Layout(zero_stage=3), 8, 8192, "bf16"))
    assert with_cp.states_bytes == without.states_bytes
    assert with_cp.activations_bytes == without.activations_bytes / 2


def test_hybrid_sharding_spreads_states_over_one_group_only():
    def states(zero_stage: ZeroStage, dp_shard: int | None, dp: int = 8) -> float:
        layout = Layout(zero_stage=zero_stage, dp_shard=dp_shard)
        return memory_per_device(run_of(LLAMA_8B, layout, dp, 128, "bf16")).states_bytes

    assert states(3, 2) == states(3, None, dp=2) == 4 * states(3, None)
    assert states(3, 8) == states(3, None)
    assert states(1, 2) == states(1, None)


def test_gradients_reduced_once_a_step_are_whole_until_then():
    def gradients(sync: Literal["every", "last"], num_microbatches: int) -> float:
        layout = Layout(zero_stage=3, gradient_sync=sync)
        memory = memory_per_device(
            run_of(LLAMA_8B, layout, 8, 128, "bf16", num_microbatches=num_microbatches)
        )
        return memory.gradients_bytes / num_parameters(LLAMA_8B)

    assert gradients("every", 4) == gradients("last", 1) == pytest.approx(4 / 8)
    assert gradients("last", 4) == pytest.approx(4)


def test_sequence_parallelism_cuts_the_kept_inputs_as_well():
    def activations(sequence_parallel: bool, recompute: str) -> float:
        layout = Layout.model_validate(
            {"tp": 4, "sequence_parallel": sequence_parallel, "recompute": recompute}
        )
        return memory_per_device(run_of(GPT_1B3, layout, 1, 2048, "fp16")).activations_bytes

    for recompute in ("none", "full"):
        assert activations(True, recompute) < activations(False, recompute)
    h, block = GPT_1B3.hidden_size, GPT_1B3.hidden_size * (8 + 24) / 4
    assert activations(True, "full") == 2048 * (24 * 2 * h / 4 + block)


def test_selective_recomputation_saves_what_the_bound_leaves_out():
    kept, selective = (
        memory_per_device(run_of(GPT_1B3, layout, 1, 2048, "fp16")).total_bytes
        for layout in (Layout(), Layout(recompute="selective"))
    )
    assert kept == selective


def test_16_bit_copies_of_all_blocks_are_kept_and_with_recomputation_of_one():
    def copies(layout: Layout, dtype: Dtype) -> float:
        return memory_per_device(run_of(TINY, layout, 4, 128, dtype)).copies_bytes

    blocks = parameter_parts(TINY)["blocks"]
    assert copies(Layout(), "bf16") == pytest.approx(2 * blocks)
    assert copies(Layout(recompute="full"), "bf16") == pytest.approx(2 * blocks / TINY.num_layers)
    assert copies(Layout(), "fp32") == 0


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 2), ("fp32", 4)])
def test_zero_2_keeps_all_gathered_weights(dtype: Dtype, width: int):
    memory = memory_per_device(run_of(TINY, Layout(zero_stage=2), 4, 128, dtype))
    assert memory.copies_bytes == pytest.approx(width * num_parameters(TINY))


def test_masters_of_megatron_are_sharded_with_the_optimizer():
    layout, parameters = Layout(cp=2, zero_stage=1), num_parameters(LLAMA_8B)
    native = memory_per_device(run_of(LLAMA_8B, layout, 32, 8192, "bf16"))
    other = memory_per_device(run_of(LLAMA_8B, layout, 32, 8192, "bf16"), optimizer_masters=True)
    assert native.states_bytes == pytest.approx((4 + 4 + 8 / 64) * parameters)
    assert other.states_bytes == pytest.approx((2 + 2 + 12 / 64) * parameters)
    assert other.copies_bytes == 0 and other.total_bytes < 79 * 2**30 < native.total_bytes
    wide = [
        memory_per_device(run_of(TINY, Layout(), 1, 8, "fp32"), optimizer_masters=x)
        for x in (True, False)
    ]
    assert wide[0] == wide[1]


def test_one_device_has_nothing_to_gather():
    assert memory_per_device(run_of(TINY, Layout(zero_stage=3), 1, 128, "fp32")).copies_bytes == 0


def test_zero_3_gathers_two_blocks_and_the_ends_only():
    gathered = memory_per_device(run_of(LLAMA_8B, LEAN, 64, 128, "bf16")).copies_bytes / 2
    two_blocks_and_ends = num_parameters(LLAMA_8B.model_copy(update={"num_layers": 2}))
    assert gathered == pytest.approx(two_blocks_and_ends)


def test_a_gpt_block_keeps_korthikantis_bytes_without_masks_and_scores():
    h = GPT_1B3.hidden_size
    assert 2 * saved_activations_per_token(GPT_1B3, Layout()) == h * (8 + 24)
    assert 2 * saved_activations_per_token(GPT_1B3, Layout(tp=4)) == h * (8 + 24 / 4)
    spread = Layout(tp=4, sequence_parallel=True)
    assert 2 * saved_activations_per_token(GPT_1B3, spread) == h * (8 + 24) / 4


def test_relu_keeps_its_output_only():
    h, f = OPT_13B.hidden_size, OPT_13B.ffn_size
    assert 2 * saved_activations_per_token(OPT_13B, Layout()) == 2 * (4 * h + 4 * h + f)


def test_full_recompute_keeps_block_inputs_and_one_open_block():
    memory = memory_per_device(run_of(GPT_1B3, Layout(recompute="full"), 1, 2048, "fp16"))
    h = GPT_1B3.hidden_size
    assert memory.activations_bytes == 2048 * (24 * 2 * h + h * (8 + 24))


def test_the_first_stage_keeps_one_micro_batch_per_stage_in_flight():
    flat = memory_per_device(run_of(GPT_1B3, Layout(), 1, 2048, "fp16")).activations_bytes
    piped = memory_per_device(run_of(GPT_1B3, Layout(pp=4), 1, 2048, "fp16")).activations_bytes
    assert piped == pytest.approx(flat)


def test_a_short_pipeline_keeps_fewer_and_interleaving_keeps_more_in_flight():
    def activations(layout: Layout, num_microbatches: int | None = None) -> float:
        return memory_per_device(
            run_of(GPT_1B3, layout, 1, 2048, "fp16", num_microbatches=num_microbatches)
        ).activations_bytes

    plain = activations(Layout(pp=4))
    assert activations(Layout(pp=4), 2) == plain / 2
    assert activations(Layout(pp=4, vp=3), 32) == pytest.approx(plain * (1 + 3 / 12))
    assert activations(Layout(pp=4, schedule="gpipe"), 32) == plain * 8
    assert activations(Layout(pp=4, vp=3, schedule="gpipe"), 32) == plain * 8
    assert activations(Layout(pp=4, schedule="zero-bubble"), 32) == plain


def test_where_embedding_and_head_count_as_layers_the_ends_hold_a_layer_less():
    """126 layers over 16 ranks are 7, 14 times 8, and 7."""
    rope = LLAMA_405B.model_copy(update={"vocab_size": 128})
    layout = Layout(pp=16, recompute="full")
    block = parameter_parts(rope)["blocks"] / 126
    states = memory_per_device(run_of(rope, layout, 1, 128, "bf16")).states_bytes
    assert states == pytest.approx(16 * 8 * block)

    whole = memory_per_device(run_of(LLAMA_405B, layout, 1, 128, "bf16")).states_bytes
    ends = parameter_parts(LLAMA_405B)["head"] + parameter_parts(LLAMA_405B)["norms"]
    assert whole <= 16 * max(8 * block, 7 * block + ends)


def test_a_rank_of_no_layers_needs_its_ends_only():
    two = TINY.model_copy(update={"num_layers": 2})
    for recompute in ("none", "full"):
        layout = Layout.model_validate({"pp": 4, "recompute": recompute, "zero_stage": 3})
        assert memory_per_device(run_of(two, layout, 2, 128, "bf16")).total_bytes > 0


@given(
    pp=st.integers(2, 16),
    vp=st.integers(1, 4),
    layers=st.integers(1, 130),
    recompute=st.sampled_from(["none", "full"]),
)
def test_no_rank_is_charged_with_more_layers_than_one_holds(
    pp: int, vp: int, layers: int, recompute: str
):
    shape = TINY.model_copy(update={"num_layers": layers})
    layout = Layout.model_validate({"pp": pp, "vp": vp, "recompute": recompute})
    try:
        sizes = stage_sizes(layers, pp, vp)
    except ValueError:
        with pytest.raises(ValueError, match="cannot be split"):
            memory_per_device(run_of(shape, layout, 1, 128, "bf16"))
        return
    parts = parameter_parts(shape)
    ends = sum(size for part, size in parts.items() if part != "blocks")
    most = max(sum(sizes[rank::pp]) for rank in range(pp))
    states = memory_per_device(run_of(shape, layout, 1, 128, "bf16")).states_bytes
    assert states <= 16 * (most * parts["blocks"] / layers + ends + parts["embedding"]) * 1.000001


def test_a_large_vocabulary_makes_the_last_stage_the_fullest():
    wide = TINY.model_copy(update={"vocab_size": 10**6, "tied_embeddings": False})
    wide_last = wide.model_copy(update={"positions": "rope"})
    memory = memory_per_device(run_of(wide_last, Layout(pp=2, recompute="full"), 1, 2048, "bf16"))
    assert memory.logits_bytes > 0
    assert memory_per_device(run_of(LLAMA_70B, Layout(pp=4), 1, 8192, "bf16")).logits_bytes == 0


def test_frozen_weights_of_lora_cost_two_bytes_and_trained_ones_sixteen_and_a_copy():
    memory = memory_per_device(run_of(OPT_13B, Layout(), 8, 512, "fp16", OPT_13B_LORA))
    frozen, trained = 12_582_912_000, trainable_parameters(OPT_13B, OPT_13B_LORA)
    ends = num_parameters(OPT_13B) - parameter_parts(OPT_13B)["blocks"]
    assert memory.states_bytes == pytest.approx(2 * frozen + 16 * trained)
    assert memory.copies_bytes == pytest.approx(2 * (trained - ends))


def test_lora_fits_where_full_training_does_not():
    full = memory_per_device(run_of(OPT_13B, Layout(recompute="full"), 1, 512, "fp16")).total_bytes
    adapted = memory_per_device(
        run_of(OPT_13B, Layout(recompute="full"), 1, 512, "fp16", OPT_13B_LORA)
    ).total_bytes
    assert adapted < 80e9 < full


def test_parts_and_context_add_up():
    without = memory_per_device(run_of(TINY, Layout(), 1, 128, "fp32"))
    with_context = memory_per_device(run_of(TINY, Layout(), 1, 128, "fp32"), context_bytes=1e9)
    assert with_context.total_bytes - without.total_bytes == pytest.approx(1e9)
    parts = vars(without)
    assert without.total_bytes == pytest.approx(sum(parts.values()))


dp = st.sampled_from([1, 2, 4, 8, 64])
stages = st.sampled_from([0, 1, 2, 3])


@given(dp=dp, zero_stage=stages, seq_len=st.integers(128, 8192))
def test_more_replicas_or_recompute_never_need_more(dp: int, zero_stage: int, seq_len: int):
    def total(replicas: int, recompute: str) -> float:
        layout = Layout.model_validate({"zero_stage": zero_stage, "recompute": recompute})
        return memory_per_device(run_of(LLAMA_8B, layout, replicas, seq_len, "bf16")).total_bytes

    assert total(2 * dp, "none") <= total(dp, "none")
    assert total(dp, "full") < total(dp, "none")


@given(dp=st.sampled_from([2, 8, 64]), seq_len=st.integers(128, 8192))
def test_a_higher_zero_stage_never_needs_more(dp: int, seq_len: int):
    totals = [
        memory_per_device(run_of(LLAMA_8B, Layout(zero_stage=z), dp, seq_len, "bf16")).total_bytes
        for z in (0, 1, 2, 3)
    ]
    assert totals == sorted(totals, reverse=True)


@given(micro_batch=st.integers(1, 32))
def test_a_larger_micro_batch_needs_more(micro_batch: int):
    need, more = (
        memory_per_device(run_of(TINY, Layout(micro_batch=b), 1, 128, "bf16")).total_bytes
        for b in (micro_batch, micro_batch + 1)
    )
    assert more > need


@pytest.mark.parametrize("shape", [TINY, LLAMA_8B, LLAMA_70B, LLAMA_405B])
def test_the_smallest_fit_fits_and_half_of_it_does_not(shape: DecoderShape):
    card = 192e9
    num = min_devices_to_fit(shape, 8192, "bf16", card)
    assert num is not None
    assert memory_per_device(run_of(shape, LEAN, num, 8192, "bf16")).total_bytes <= card
    if num > 1:
        assert memory_per_device(run_of(shape, LEAN, num // 2, 8192, "bf16")).total_bytes > card


def test_what_one_sequence_needs_cannot_be_sharded_away():
    assert min_devices_to_fit(LLAMA_70B, 8192, "bf16", 15e9) is None
    alone = memory_per_device(run_of(LLAMA_70B, LEAN, MAX_DEVICES, 8192, "bf16"))
    assert alone.activations_bytes + alone.copies_bytes > 15e9


def test_the_context_counts_against_the_device():
    assert min_devices_to_fit(TINY, 128, "bf16", 1e9) == 1
    assert min_devices_to_fit(TINY, 128, "bf16", 1e9, context_bytes=1e9) is None


def test_nvidias_70b_layout_fits_the_h100_it_ran_on_but_no_a100_of_40_gb():
    layout = Layout(tp=4, pp=4, cp=2, vp=5, zero_stage=1, sequence_parallel=True)
    needed = memory_per_device(
        run_of(LLAMA_70B, layout, 2, 8192, "bf16", num_microbatches=64)
    ).total_bytes
    assert 40960 * MIB < needed < 81559 * MIB


def test_a_padded_vocabulary_is_counted():
    def states(shape: DecoderShape) -> float:
        return memory_per_device(run_of(shape, Layout(), 1, 128, "fp16")).states_bytes

    assert states(GPT_1B3_PADDED) - states(GPT_1B3) == pytest.approx(16 * (47 + 2) * 2048)


@pytest.mark.parametrize(("pp", "vp"), [(2, 1), (4, 1), (8, 4), (7, 1), (63, 1)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_cut_of_deepseek_has_a_memory_that_is_less_than_the_whole(
    pp: int, vp: int, recompute: Recompute
):
    model = load_recipe("deepseek-v3").model
    cut = Layout(pp=pp, vp=vp, ep=8, zero_stage=1, recompute=recompute)
    whole = memory_per_device(run_of(model, Layout(ep=8, zero_stage=1), 64, 4096, "bf16"))
    assert (
        0
        < memory_per_device(run_of(model, cut, 64, 4096, "bf16")).states_bytes
        < whole.states_bytes
    )
