"""The memory model compared with the native trainer's memory on one H100."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks._gpu_memory import native_on_a_gpu
from paceline.estimate.memory.device_memory import memory
from paceline.estimate.memory.framework import NATIVE_CUDA
from paceline.estimate.model.case import Case, cases_of


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return native_on_a_gpu()


def test_live_tensors_on_a_gpu_are_met_within_two_percent(rows: list[dict[str, Any]]) -> None:
    ratios = {(row["case"], row["dtype"], row["compile"]): row["ratio"] for row in rows}
    assert len(ratios) == 8
    for what, ratio in ratios.items():
        assert ratio["allocated"] == pytest.approx(1, abs=0.02), what


def test_odds_of_running_out_are_no_surer_than_what_the_device_used(
    rows: list[dict[str, Any]],
) -> None:
    missed = np.log([row["ratio"]["device_used"] for row in rows])
    assert 2 * np.sqrt(np.mean(missed**2)) < NATIVE_CUDA.log_sd


BLOCK = Case(
    layers=4, hidden=1024, ffn=4096, heads=8, kv_heads=8, head_dim=128, vocab=0, seq_len=1024,
    peak_16bit=1, memory_bytes_per_s=1, intra_bytes_per_s=1, inter_bytes_per_s=1, devices=1,
    global_batch=1, generation="hopper",
)  # fmt: skip


ADAPTED = {
    **{"frozen": True, "trained_share": 0.0, "devices": 2},
    **{"adapter_inputs": 3072, "adapter_parts": 1024, "adapter_drops": True},
}


def numbers(**changes: Any) -> float:
    """That a block keeps of a token, over h."""
    few, many = (replace(BLOCK, layers=layers, **changes) for layers in (4, 8))
    kept = [memory(cases_of([c]), NATIVE_CUDA).activations[0] for c in (few, many)]
    of_copies = (
        2
        * (4 + 4 * (3 if changes.get("gated") else 2))
        * 1024**2
        * (0.0 if changes.get("frozen") else 1.0)
    )
    sums = 4 * 8 / 2 / 1024 / changes.get("tp", 1)
    return (kept[1] - kept[0]) / 4 / 1024 / 2 / 1024 - of_copies / 1024 / 2 / 1024 - sums


@pytest.mark.parametrize(
    ("changes", "h"),
    [
        ({}, 16),
        ({"relu": True}, 12),
        ({"relu": True, "compiled": True}, 14),
        ({"gated": True}, 8 + 4 * 4),
        ({"gated": True, "compiled": True}, 8 + 3 * 4),
        ({"compiled": True, "peak_narrow": 1.0}, 14),
        ({"frozen": True, "trained_share": 0.0}, 2 + 4 + 4),
        ({"frozen": True, "trained_share": 0.0, "gated": True, "compiled": True}, 2 + 4 + 2 * 4),
        (
            {"frozen": True, "trained_share": 0.0, "adapter_inputs": 4096, "adapter_drops": True},
            2 + 4 + 4 + 4 + 2,
        ),
        # Each of two tensor ranks has the inputs of q, k and v whole, and half of o's.
        (ADAPTED | {"tp": 2}, 2 + 4 / 2 + 4 / 2 + (3 + 1 / 2) * 1.5),
        (ADAPTED | {"tp": 2, "sequence_parallel": True}, 2 / 2 + 4 / 2 + 4 / 2 + 3.5 * 1.5),
    ],
)
def test_a_block_keeps_what_its_backward_pass_needs(changes: dict[str, Any], h: float) -> None:
    assert numbers(**changes) == pytest.approx(h, rel=0.002)


def test_a_softmax_reads_fp16_logits_itself_and_bf16_ones_in_fp32():
    case = Case(
        layers=2, hidden=64, ffn=256, heads=4, kv_heads=4, head_dim=16, vocab=1000, seq_len=128,
        gated=False, peak_16bit=1, memory_bytes_per_s=1, intra_bytes_per_s=1, inter_bytes_per_s=1,
        devices=1, global_batch=1, generation="volta",
    )  # fmt: skip
    bf16, fp16 = (
        memory(cases_of([replace(case, half=half)]), NATIVE_CUDA).logits[0]
        for half in (False, True)
    )
    assert bf16 - fp16 == pytest.approx(4 * 128 * 1000)


def test_a_head_that_trains_beside_adapters_has_its_gradient_in_the_loss():
    case = Case(
        layers=2, hidden=64, ffn=256, heads=4, kv_heads=4, head_dim=16, vocab=1000, seq_len=128,
        gated=False, peak_16bit=1, memory_bytes_per_s=1, intra_bytes_per_s=1, inter_bytes_per_s=1,
        devices=8, global_batch=8, zero_stage=3, generation="hopper", frozen=True,
    )  # fmt: skip
    adapters, rest = (
        memory(cases_of([replace(case, trains_head=trains)]), NATIVE_CUDA).logits[0]
        for trains in (False, True)
    )
    assert rest - adapters == pytest.approx(4 * 64 * 1000)
