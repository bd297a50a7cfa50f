"""What a model's name, and the columns of its experts, say about its shape."""

from __future__ import annotations

import pytest

from paceline.estimate.fit.published import implementation_of, read_row
from paceline.estimate.fit.row_details import experts_of, gate_by_size, head_width, is_gated
from tests.estimate.fit.test_published import ROW

LARGE = {
    **ROW, "layers": "94", "hidden": "4096", "heads": "64", "kv_heads": "4", "vocab": "151936",
    "seq_len": "4096", "gpu": "GB300", "num_gpus": "256", "gbs": "8192", "mbs": "2", "tp": "1",
    "pp": "4", "ep": "32", "dtype": "bf16", "recompute": "", "attention_impl": "", "zero": "1",
    "model": "house model", "ffn": "", "stack": "megatron-bridge",
}  # fmt: skip
COUNTS = {"n_experts": "128", "topk": "8", "moe_ffn": "1536"}


@pytest.mark.parametrize(
    ("model", "width", "stated", "gated"),
    [
        ("Nemotron-H 8B", 5.25, "", False),
        ("Falcon-40B", 4.0, "", False),
        ("Llama-3.3-Nemotron-49B", 3.5, "", True),
        ("GPT3-175B", 4.0, "", False),
        ("house model", 4.0, "gated", True),
        ("house model", 2.7, "non-gated MLP (squared ReLU)", False),
        ("llama-3-8b", 3.5, "batch as explained in its readme", True),
        ("gpt-3 175B", 4.0, "TFLOP/s aggregated over ranks", False),
        ("Mixtral-like", 3.5, "ungated", False),
    ],
)
def test_families_and_statements_come_before_the_width(
    model: str, width: float, stated: str, gated: bool
):
    assert is_gated(model, width, stated) is gated


def test_the_number_of_parameters_tells_where_no_family_does():
    plain, gate = 12.9e9, 5.4e9
    assert gate_by_size("house 13B", plain, gate) == -1
    assert gate_by_size("house 18.2B", plain, gate) == 1
    assert gate_by_size("house", plain, gate) == 0
    assert gate_by_size("house 15.4B", plain, gate) == 0
    named = {**ROW, "layers": "40", "hidden": "5120", "heads": "40", "gpu": "H100-SXM-80GB"}
    assert not read_row({**named, "model": "house 13B"}).case.gated
    assert read_row({**named, "model": "house 17B"}).case.gated


def test_columns_of_experts_come_before_the_family():
    stated = read_row({**LARGE, **COUNTS, "n_shared_experts": "2"})
    assert stated.kind == "moe" and stated.software == "nemo"
    assert (stated.case.experts, stated.case.experts_per_token, stated.case.ffn) == (128, 8, 1536)
    assert stated.case.shared_ffn == 2 * 1536 and stated.case.gated and stated.case.flash


@pytest.mark.parametrize(
    ("model", "experts", "width"),
    [("GPT OSS 120B", 128, 2880), ("Qwen3_30B_a3B", 128, 768), ("DeepSeek-V3", 256, 2048)],
)
def test_families_of_experts_are_known(model: str, experts: int, width: int):
    case = read_row({**LARGE, "model": model}).case
    assert (case.experts, case.ffn) == (experts, width)
    assert experts_of("a model of nobody") is None


def test_heads_may_be_wider_than_the_hidden_size_and_scores_than_heads():
    assert head_width("Qwen3-235B-A22B") == 128 and head_width("Llama-3.1-8B") is None
    latent = read_row({**LARGE, "model": "DeepSeek-V3", "heads": "128", "hidden": "7168"}).case
    assert latent.score_width > latent.head_dim


@pytest.mark.parametrize(
    ("row", "stack"),
    [
        ({"attention_impl": "flash", "zero": "3", "pp": "16"}, "fused"),
        ({"attention_impl": "", "stack": "maxtext", "zero": "3"}, "fused"),
        ({"attention_impl": "flash", "stack": "torchtitan", "pp": "4"}, "torch"),
    ],
)
def test_software_and_pipelines_tell_how_blocks_are_computed(row: dict[str, str], stack: str):
    assert implementation_of(row) == stack


def test_few_micro_batches_a_stage_are_interleaved_where_nobody_says():
    long = {
        **ROW, "model": "Llama 3 405B", "layers": "126", "hidden": "16384", "heads": "128",
        "kv_heads": "8", "ffn": "53248", "gpu": "H100-SXM-80GB", "num_gpus": "16384",
        "gbs": "2048", "mbs": "1", "tp": "8", "pp": "16", "attention_impl": "flash", "vp": "",
        "step_time_s": "900",
    }  # fmt: skip
    assert read_row(long).case.vp == 4
    assert read_row({**long, "vp": "1"}).case.vp == 1
    assert read_row({**long, "gbs": "65536"}).case.vp == 1
