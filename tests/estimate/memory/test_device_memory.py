"""The memory model: parts by hand, what a layout changes, and whether it fits."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.layout import Layout
from paceline.core.memory import memory_per_device
from paceline.core.shape import DecoderShape
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.memory.device_memory import (
    MemoryEstimate,
    memory,
    p_oom,
    rank_memory,
    verdict,
)
from paceline.estimate.memory.framework import (
    BY_SOFTWARE,
    FRAMEWORKS,
    NATIVE_CPU,
    NATIVE_CUDA,
    Framework,
    frameworks_of,
)
from paceline.estimate.model.case import Case, cases_of, cases_with
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import estimate
from tests.core.shapes import run_of

GIB = 2**30
PLAIN = Framework(weight=2, gradient=4, master=4)
"""Megatron's bytes, without anything that was fitted."""
LLAMA_8B = Case(
    layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256,
    seq_len=8192, gated=True, peak_16bit=989.5e12, memory_bytes_per_s=3.35e12,
    intra_bytes_per_s=450e9, inter_bytes_per_s=50e9, devices=8, global_batch=64,
    generation="hopper",
)  # fmt: skip
BLOCK = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
LLAMA_PARAMETERS = 32 * BLOCK + 2 * 128256 * 4096 + 4096
T = 8192
"""Tokens of a micro-batch."""

sizes = st.sampled_from([1.0, 2.0, 4.0, 8.0])
layouts = st.fixed_dictionaries(
    {
        "tp": sizes, "pp": sizes, "cp": st.sampled_from([1.0, 2.0]),
        "vp": st.sampled_from([1.0, 2.0]),
        "micro_batch": sizes, "zero_stage": st.sampled_from([0.0, 1.0, 2.0, 3.0]),
        "full_recompute": st.booleans(), "selective_recompute": st.booleans(),
        "sequence_parallel": st.booleans(), "flash": st.booleans(), "frozen": st.booleans(),
        "gated": st.booleans(), "tied": st.booleans(), "devices": st.sampled_from([64.0, 1024.0]),
        "schedule": st.sampled_from(["1f1b", "gpipe", "zero-bubble"]),
        "implementation": st.sampled_from(["softmax", "fused", "torch"]),
    }
)  # fmt: skip


def needed(frameworks: Any = PLAIN, **changes: Any) -> MemoryEstimate:
    return memory(cases_of([replace(LLAMA_8B, **changes)]), frameworks)


def part(name: str, frameworks: Any = PLAIN, **changes: Any) -> float:
    return float(getattr(needed(frameworks, **changes), name)[0])


@given(layouts)
def test_parts_are_no_debts_and_add_up_to_what_the_device_uses(layout: dict[str, Any]):
    found = needed(FRAMEWORKS, **layout)
    parts = found.at(0)
    assert all(size >= 0 for name, size in parts.items() if name != "not_at_once")
    assert parts["not_at_once"] <= 0
    assert sum(parts.values()) == pytest.approx(found.device_used[0])
    assert 0 < found.allocated[0] <= found.reserved[0] <= found.device_used[0]


@given(layouts)
def test_no_rank_needs_more_than_what_is_needed(layout: dict[str, Any]):
    x = cases_of([replace(LLAMA_8B, **layout)])
    ranks = [float(rank_memory(x, rank, FRAMEWORKS).needed_bytes[0]) for rank in (0, 1, -1)]
    assert float(memory(x, FRAMEWORKS).needed_bytes[0]) == pytest.approx(max(ranks))


def test_deepspeed_holds_16_bit_weights_and_gradients_and_shares_masters():
    layout = {"implementation": "torch", "software": "deepspeed", "zero_stage": 1}
    known = frameworks_of("hopper", False)
    assert part("weights", known, **layout) == pytest.approx(2 * LLAMA_PARAMETERS, rel=1e-3)
    assert part("gradients", known, **layout) == pytest.approx(2 * LLAMA_PARAMETERS, rel=1e-3)
    assert part("optimizer", known, **layout) == pytest.approx(12 * LLAMA_PARAMETERS / 8, rel=1e-3)
    fsdp = {**layout, "software": "torchtitan"}
    assert part("weights", known, **fsdp) == pytest.approx(4 * LLAMA_PARAMETERS, rel=1e-3)


def test_recomputing_selectively_never_keeps_more():
    cut = {"implementation": "torch", "tp": 8, "sequence_parallel": True}
    less = part("activations", FRAMEWORKS, **cut, selective_recompute=True)
    assert less < part("activations", FRAMEWORKS, **cut)


@settings(deadline=None)
@given(st.lists(layouts, min_size=2, max_size=6))
def test_many_cases_in_one_call_are_estimated_as_each_alone(many: list[dict[str, Any]]):
    cases = [replace(LLAMA_8B, **layout) for layout in many]
    together = memory(cases_of(cases)).device_used
    alone = [float(memory(cases_of([case])).device_used[0]) for case in cases]
    assert together.tolist() == pytest.approx(alone)


def test_states_are_eighteen_bytes_a_parameter_until_zero_shards_them():
    ranks = LLAMA_8B.devices
    for stage, weight, gradient, optimizer in (
        (0, 2, 4, 12),
        (1, 2, 4, 12 / ranks),
        (2, 2, 4 / ranks, 12 / ranks),
        (3, 2 / ranks, 4 / ranks, 12 / ranks),
    ):
        found = needed(zero_stage=stage)
        told = [found.weights[0], found.gradients[0], found.optimizer[0]]
        assert told == pytest.approx([n * LLAMA_PARAMETERS for n in (weight, gradient, optimizer)])


def test_zero_3_holds_two_blocks_and_both_ends_gathered():
    assert part("gathered", zero_stage=3) == pytest.approx(
        2 * (2 * BLOCK + 2 * 128256 * 4096 + 4096)
    )
    assert part("gathered", zero_stage=1) == 0


def test_gradients_reduced_once_a_step_are_whole_until_then():
    each = part("gradients", zero_stage=3, global_batch=64)
    once = part("gradients", zero_stage=3, global_batch=64, gradients_once=True)
    alone = part("gradients", zero_stage=3, global_batch=8, gradients_once=True)
    assert once == pytest.approx(8 * each)
    assert alone == pytest.approx(each)


def test_hybrid_sharding_keeps_one_copy_for_each_group():
    assert part("weights", zero_stage=3, dp_shard=2) == pytest.approx(LLAMA_PARAMETERS)
    assert part("optimizer", zero_stage=3, dp_shard=2) == pytest.approx(6 * LLAMA_PARAMETERS)


def test_eight_bit_moments_and_summed_gradients_change_their_own_part_alone():
    assert part("optimizer", moment_bytes=1) == pytest.approx(6 * LLAMA_PARAMETERS)
    assert part("gradients", summed_gradient_bytes=4) == pytest.approx(8 * LLAMA_PARAMETERS)


def test_eight_bit_products_keep_two_bytes_of_copies_a_weight_and_four_bit_ones_one():
    cached = replace(PLAIN, narrow_copies=2)
    assert part("buffers", cached) == 0
    for four_bit, size in ((False, 2), (True, 1)):
        kept = part("buffers", cached, peak_narrow=2e15, four_bit=four_bit)
        assert kept == pytest.approx(size * 32 * BLOCK)


def test_no_cases_are_no_memory():
    none = cases_of([LLAMA_8B]).pick(np.array([], dtype=np.int64))
    assert memory(none).device_used.size == 0


def test_a_gated_block_keeps_norms_heads_and_three_tensors_of_the_ffn():
    heads = 2 * (32 + 8) * 128
    block = 2 * (4 * 4096 + heads + 3 * 14336) + 4 * 32
    assert part("activations") == pytest.approx(32 * T * block)


def test_gpt_with_stored_scores_is_korthikantis_34_and_5_a_s():
    gpt = {"gated": False, "kv_heads": 32, "ffn": 4 * 4096}
    masked = replace(PLAIN, masks=2)
    scores = 5 * 32 * T
    assert part("activations", masked, **gpt, flash=False) == pytest.approx(
        32 * T * (34 * 4096 + scores)
    )
    assert part("activations", masked, **gpt, flash=False, tp=4) == pytest.approx(
        32 * T * (4096 * (10 + 24 / 4) + scores / 4)
    )
    assert part("activations", masked, **gpt, flash=False, tp=4, sequence_parallel=True) == (
        pytest.approx(32 * T * (34 * 4096 + scores) / 4)
    )


def test_selective_recomputation_drops_the_scores_and_full_one_all_but_the_inputs():
    stored = part("activations", flash=False)
    selective = part("activations", flash=False, selective_recompute=True)
    assert selective == pytest.approx(part("activations"))
    assert stored - selective == pytest.approx(32 * T * 32 * (5 * T - 4))
    inputs, block = 2 * 4096 * T, part("activations") / 32
    assert part("activations", full_recompute=True) == pytest.approx(32 * inputs + block)


def test_torchtitans_selective_recomputation_keeps_every_second_product():
    keeps = replace(PLAIN, saves_every_second_gemm=1.0)
    # A block's input, queries, values, attention's output, the gate and down, of bf16; and the lse.
    numbers = 4096 + 4096 + 1024 + 4096 + 14336 + 4096
    found = part("activations", keeps, selective_recompute=True)
    assert found == pytest.approx(32 * T * (2 * numbers + 4 * 32))


def test_recomputed_blocks_and_logits_do_not_exist_at_once():
    found = needed(full_recompute=True)
    block = part("activations") / 32
    assert found.not_at_once[0] == pytest.approx(min(block, found.logits[0]))


@pytest.mark.parametrize(
    ("schedule", "vp", "rank", "waiting"),
    [("1f1b", 1, 0, 4), ("1f1b", 1, 1, 3), ("1f1b", 1, -1, 1), ("zero-bubble", 1, 0, 4),
     ("gpipe", 1, 0, 16), ("1f1b", 2, 0, 4 * (1 + 3 / 8))],
)  # fmt: skip
def test_a_rank_keeps_the_micro_batches_in_flight(
    schedule: str, vp: int, rank: int, waiting: float
):
    piped = replace(LLAMA_8B, pp=4, vp=vp, schedule=schedule, devices=4, global_batch=16)  # type: ignore[arg-type]
    found = rank_memory(cases_of([piped]), rank, PLAIN)
    assert found.activations[0] == pytest.approx(waiting * part("activations") / 4)


def test_zero_bubble_puts_weight_gradients_off_on_later_ranks_up_to_the_firsts_micro_batches():
    piped = replace(LLAMA_8B, pp=4, devices=4, global_batch=16, schedule="zero-bubble")
    outputs = 2 * T * (2 * 4096 + (32 + 2 * 8) * 128 + 2 * 14336)
    for rank in (1, 3):
        found = rank_memory(cases_of([piped]), rank, PLAIN).activations[0]
        assert found == pytest.approx(part("activations") + (rank + 1) * 8 * outputs)


def test_the_fullest_stage_counts_and_that_may_be_the_last_one():
    piped = cases_of([replace(LLAMA_8B, pp=4, devices=4, full_recompute=True, vocab=4 * 128256)])
    first, last = (float(rank_memory(piped, rank, PLAIN).device_used[0]) for rank in (0, -1))
    assert rank_memory(piped, 0, PLAIN).logits[0] == 0
    assert memory(piped, PLAIN).device_used[0] == max(first, last) == last


def test_layers_that_do_not_divide_lie_on_the_first_stages():
    uneven = cases_of([replace(LLAMA_8B, pp=5, devices=5)])
    first = rank_memory(uneven, 0, PLAIN).weights[0] / 2
    assert first == pytest.approx(7 * BLOCK + 128256 * 4096)


def test_experts_lie_on_the_ranks_of_expert_parallelism():
    moe = {"experts": 8, "experts_per_token": 2, "zero_stage": 1}
    router = 32 * 4096 * 8
    rest = LLAMA_PARAMETERS - 32 * 3 * 4096 * 14336 + router
    for ep in (1, 4):
        experts = 32 * 3 * 4096 * 14336 * 8 / ep
        assert part("weights", **moe, ep=ep) == pytest.approx(2 * (rest + experts))
        shared = rest / 8 + experts / (8 / ep)
        assert part("optimizer", **moe, ep=ep) == pytest.approx(12 * shared)


def test_adapters_alone_have_gradients_and_moments():
    lora = needed(frozen=True, trained_share=0.01)
    own = 0.01 * 32 * BLOCK
    assert lora.gradients[0] == pytest.approx(4 * own)
    assert lora.weights[0] == pytest.approx(2 * (LLAMA_PARAMETERS + own))


def test_a_cpu_has_neither_fragmentation_nor_context():
    found = needed(FRAMEWORKS, generation="cpu", tp=2)
    assert found.allocated[0] == found.device_used[0]


def test_a_measured_context_takes_the_place_of_the_usual_one():
    x = cases_of([LLAMA_8B])
    assert memory(x, PLAIN, context_bytes=7.0).context[0] == 7
    assert memory(x, PLAIN).context[0] == 800 * 2**20


def test_a_stack_without_constants_is_refused():
    with pytest.raises(ValueError, match="torch"):
        needed({"fused": PLAIN}, implementation="torch")


@given(layouts)
def test_the_native_estimate_is_never_below_what_run_refuses_by(layout: dict[str, Any]):
    layout |= {"implementation": "fused", "frozen": False, "flash": True}
    layout |= {"vp": 1.0} if layout["pp"] == 1 or layout["schedule"] != "1f1b" else {}
    layout |= {"sequence_parallel": layout["sequence_parallel"] and layout["tp"] > 1}
    recompute = (
        "full"
        if layout["full_recompute"]
        else "selective"
        if layout["selective_recompute"]
        else "none"
    )
    shape = DecoderShape(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_size=14336,
        vocab_size=128256,
        gated_ffn=layout["gated"],
        norm="rmsnorm" if layout["gated"] else "layernorm",
        positions="rope",
        bias=not layout["gated"],
        tied_embeddings=layout["tied"],
    )
    axes: dict[str, Any] = {
        name: int(layout[name]) for name in ("tp", "pp", "cp", "vp", "micro_batch", "zero_stage")
    }
    used = Layout(
        **axes,
        recompute=recompute,
        sequence_parallel=layout["sequence_parallel"],
        schedule=layout["schedule"] if layout["pp"] > 1 else "1f1b",
    )
    layout["devices"], batch = 8.0 * used.model_devices, 16.0 * 8 * used.micro_batch
    bound = memory_per_device(run_of(shape, used, 8, T, "bf16", num_microbatches=16))
    found = needed(NATIVE_CUDA, **layout, global_batch=batch)
    # The bound counts gathered or copied ends of the blocks a little differently.
    assert found.allocated[0] >= 0.999 * bound.total_bytes


def test_the_native_trainer_frees_gradients_where_ddp_does_not_hold_them():
    once = {"devices": 1, "global_batch": 1, "generation": "cpu"}
    assert part("not_at_once", NATIVE_CPU, **once) >= part("gradients", NATIVE_CPU, **once)
    both = {**once, "global_batch": 2}
    assert part("not_at_once", NATIVE_CPU, **both) < part("gradients", NATIVE_CPU, **both)


@pytest.mark.parametrize(
    ("changes", "without", "kept"),
    [
        # A byte a number that says where a ReLU is 0.
        ({"gated": False, "relu": True}, {}, 14336.0),
        # Masks of the outputs of attention and ffn.
        ({"drops_stream": True}, {"drops_stream": False}, 2 * 4096.0),
        (
            {"frozen": True, "adapter_inputs": 4096.0, "adapter_drops": True},
            {"adapter_drops": False},
            4096.0,
        ),
    ],
)
def test_blocks_compiled_for_a_cpu_keep_seeds_and_no_masks(
    changes: dict[str, Any], without: dict[str, Any], kept: float
):
    cpu = {"generation": "cpu", **changes, "compiled": True}
    bare = {**cpu, **without, "compiled": not changes.get("relu")}
    assert part("activations", NATIVE_CPU, **cpu) == part("activations", NATIVE_CPU, **bare)
    gpu = {"generation": "hopper"}
    more = part("activations", NATIVE_CUDA, **cpu | gpu)
    assert more - part("activations", NATIVE_CUDA, **bare | gpu) == pytest.approx(32 * T * kept)


def test_dropout_of_tensor_ranks_that_draw_apart_is_not_compiled():
    apart = {"generation": "cpu", "tp": 2, "sequence_parallel": True, "compiled": True}
    dropped, whole = (
        part("activations", NATIVE_CPU, **apart, drops_stream=drops) for drops in (True, False)
    )
    assert dropped - whole == pytest.approx(32 * T * 2 * 2 * 4096 / 2)


def test_running_out_is_even_odds_at_the_limit_and_surer_beyond():
    found = needed(FRAMEWORKS)
    used = float(found.device_used[0])
    chances = [float(p_oom(found, used * share)[0]) for share in (2.0, 1.1, 1.0, 0.9, 0.5)]
    assert chances == sorted(chances)
    assert chances[2] == pytest.approx(0.5)
    assert verdict(chances[0]) == "fits" and verdict(chances[-1]) == "out of memory"


@pytest.mark.parametrize(
    ("chance", "word"),
    [(0.09, "fits"), (0.1, "borderline"), (0.9, "borderline"), (0.91, "out of memory")],
)
def test_a_limit_within_the_80_percent_interval_is_borderline(chance: float, word: str):
    assert verdict(chance) == word


def test_thousands_of_layouts_are_one_call():
    changes = {"pp": np.tile([1.0, 2, 4, 8, 16], 1000), "micro_batch": np.repeat([1.0, 2.0], 2500)}
    found = memory(cases_with(LLAMA_8B, changes))
    assert all(getattr(found, f.name).shape == (5000,) for f in fields(MemoryEstimate))
    assert np.isfinite(found.device_used).all()


def test_a_cpu_runs_the_native_trainer_and_a_gpu_what_the_engine_says():
    assert frameworks_of("cpu", native=False) is NATIVE_CPU
    by_name = {**BY_SOFTWARE, **FRAMEWORKS}
    assert frameworks_of("hopper", native=False) == by_name
    assert frameworks_of("hopper", native=True) == {**by_name, "torch": NATIVE_CUDA}


def test_two_stages_of_opposite_directions_hold_twice_the_blocks_and_one_more_micro_batch():
    pipeline = replace(LLAMA_8B, pp=4, devices=4, vocab=0)
    dual = replace(pipeline, dual_pipe=True)
    one, two = (rank_memory(cases_of([case]), 1, PLAIN) for case in (pipeline, dual))
    assert two.weights[0] == pytest.approx(2 * one.weights[0])
    assert two.gradients[0] == pytest.approx(2 * one.gradients[0])
    assert two.optimizer[0] == pytest.approx(one.optimizer[0])
    # The second of four ranks has 3 micro-batches in flight, with two stages 4 + 1.
    assert two.activations[0] == pytest.approx(5 / 3 * one.activations[0])
    ends = [rank_memory(cases_of([replace(dual, vocab=128256)]), rank, PLAIN) for rank in (0, -1)]
    assert ends[0].weights[0] == ends[1].weights[0]
    assert ends[0].logits[0] == ends[1].logits[0] > 0


@pytest.mark.parametrize(
    ("setting", "numbers"),
    [
        ({"norm_recompute": 1}, 2 * 4096),
        ({"latent_recompute": 1}, (32 + 2 * 8) * 128),
        ({"gate_recompute": True}, 14336),
        ({"saved_bytes": 1}, 3 * 14336 / 2),
    ],
)
def test_each_recomputed_tensor_is_not_saved(setting: dict[str, float], numbers: float):
    whole, less = (part("activations", PLAIN, **fields) for fields in ({}, setting))
    assert whole - less == pytest.approx(32 * T * 2 * numbers)


def test_deepseek_v3_fits_the_devices_that_trained_it_without_full_recomputation():
    request = EstimateRequest(
        "deepseek-v3",
        "H800",
        2048,
        overrides=("layout.pp=16", "layout.recompute=selective", "training.dtype=fp8"),
    )
    other, own = (
        estimate(replace(request, software=name), shipped_evidence())
        for name in ("megatron", "hai-llm")
    )
    assert own.p_oom is not None and other.p_oom is not None
    assert own.p_oom < 0.5 < other.p_oom
    assert own.memory_bytes.device_used < 0.7 * other.memory_bytes.device_used
