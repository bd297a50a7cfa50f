"""Tables of published measurements as cases: what a gap stands for, and what cannot be modelled."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks._step_fit import fit, residual_sd
from paceline.core.errors import UserError
from paceline.estimate.calibrate.lookup import read_evidence
from paceline.estimate.fit.evidence import Evidence, evidence_of_fit, shipped_evidence
from paceline.estimate.fit.interval import (
    CAPTURED_STEP_SD,
    UNFITTED_MODEL_SD,
    bounds,
    log_sd,
    model_variance,
    slopes,
)
from paceline.estimate.fit.posterior import PRIOR, predict
from paceline.estimate.fit.published import (
    IMPOSSIBLE,
    NO_DEVICE,
    NO_EXPERTS,
    NO_LAYOUT,
    NO_SHAPE,
    NO_TIME,
    UnsupportedRowError,
    dtype_of,
    implementation_of,
    kind_of,
    read_row,
    zero_stage,
)
from paceline.estimate.fit.row_details import is_gated
from paceline.estimate.model.case import cases_of
from paceline.estimate.model.coefficients import CENTRE, NAMES, WIDTH
from paceline.estimate.model.weights import block_weights

ROW = {
    "id": "a-1", "source": "a", "model": "GPT 7.5B", "layers": "36", "hidden": "4096",
    "heads": "32", "seq_len": "2048", "gpu": "A100-SXM-80GB", "num_gpus": "128", "gbs": "512",
    "mbs": "16", "tp": "4", "dtype": "fp16", "recompute": "full",
    "attention_impl": "unfused-softmax", "step_time_s": "3.696", "zero": "0",
}  # fmt: skip


def test_gaps_have_defaults():
    case = read_row(ROW).case
    assert (case.ffn, case.kv_heads, case.head_dim, case.vocab) == (16384, 32, 128, 50688)
    assert (case.pp, case.cp, case.vp, case.ep) == (1, 1, 1, 1)
    assert case.full_recompute and not case.flash and case.implementation == "softmax"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step_time_s": ""}, NO_TIME),
        ({"layers": ""}, NO_SHAPE),
        ({"num_gpus": "?"}, NO_LAYOUT),
        ({"gpu": "Wonder-9000"}, NO_DEVICE),
        ({"ep": "8"}, NO_EXPERTS),
        ({"gbs": "2048"}, IMPOSSIBLE),
        ({"model": "Qwen9_30B_a3B"}, NO_EXPERTS),
    ],
)
def test_a_row_that_cannot_be_modelled_says_why(changes: dict[str, str], reason: str):
    with pytest.raises(UnsupportedRowError) as caught:
        read_row({**ROW, **changes})
    assert str(caught.value) == reason


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", "1e30", "many"])
def test_what_is_no_positive_number_is_a_gap(value: str):
    with pytest.raises(UnsupportedRowError, match=NO_TIME):
        read_row({**ROW, "step_time_s": value})
    with pytest.raises(UnsupportedRowError, match=NO_SHAPE):
        read_row({**ROW, "hidden": value})
    same = ("vocab", "seq_len", "gpus_per_node", "ffn", "kv_heads", "cp", "vp", "ep", "pp")
    assert read_row({**ROW, **dict.fromkeys(same, value)}) == read_row({**ROW, "seq_len": ""})


def test_a_network_that_nobody_knows_is_the_usual_one():
    usual = read_row(ROW).case
    assert read_row({**ROW, "inter_node_net": "Wonder-1", "intra_node_net": "?"}).case == usual
    slow = read_row({**ROW, "inter_node_net": "10GbE"}).case
    assert slow.inter_bytes_per_s < usual.inter_bytes_per_s / 10


def test_a_device_without_a_peak_is_left_out():
    with pytest.raises(UnsupportedRowError, match=NO_DEVICE):
        read_row({**ROW, "gpu": "cpu"})


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("BF16", "bf16"), ("bf16-mixed", "bf16"), ("amp", "bf16"), ("float16", "fp16"),
        ("FP8-CS", "fp8"), ("fp8_delayed", "fp8"), ("fp8 (unsplit col)", "fp8"),
        ("FP8-MX", "mxfp8"), ("fp8_mx", "mxfp8"), ("NVFP4", "nvfp4"), ("float32", "fp32"),
    ],
)  # fmt: skip
def test_words_for_dtypes(text: str, dtype: str):
    assert dtype_of(text) == dtype


def test_fp32_computes_at_its_own_peak():
    half, whole = read_row(ROW).case, read_row({**ROW, "dtype": "fp32", "step_time_s": "99"}).case
    assert whole.peak_16bit < half.peak_16bit / 10


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("Qwen3-30B-A3B", "moe"), ("Mixtral 8x7B", "moe"), ("DBRX", "moe"), ("LLAMA4_SCOUT", "moe"),
        ("LLAMA3.1_405B", "dense"), ("Llama-405B", "dense"), ("GPT h2048 l12", "dense"),
        ("Llama3 8b Finetuning LORA", "lora"),
    ],
)  # fmt: skip
def test_kinds_by_the_name_of_the_model(model: str, kind: str):
    assert kind_of({"model": model}) == kind


def test_a_pipeline_longer_than_the_model_is_taken_as_not_stated():
    assert read_row({**ROW, "pp": "41"}).case.pp == 1


def test_recomputation_that_is_not_stated_follows_from_the_memory():
    large = {**ROW, "recompute": "", "mbs": "64", "tp": "1", "num_gpus": "8", "step_time_s": "99"}
    assert read_row(large).case.full_recompute
    assert not read_row({**large, "mbs": "1"}).case.full_recompute
    assert not read_row({**large, "recompute": "none"}).case.full_recompute


@pytest.mark.parametrize(
    ("attention", "zero", "stack"),
    [
        ("unfused-softmax", "1", "softmax"), ("flash (TE)", "1", "fused"),
        ("flash (TE/cuDNN)", "3", "fused"), ("transformer_engine", "0", "fused"),
        ("flash", "1", "fused"), ("flash", "3", "torch"), ("flash (SDPA)", "3", "torch"),
        ("", "0", "torch"),
    ],
)  # fmt: skip
def test_the_stack_follows_from_the_attention(attention: str, zero: str, stack: str):
    assert implementation_of({"attention_impl": attention, "zero": zero}) == stack


def test_an_optimizer_with_sharded_states_is_stage_1():
    assert zero_stage("0 (BF16_Optimizer, sharded optim states)") == 1
    assert [zero_stage(text) for text in ("0", "1", "2", "3", "")] == [0, 1, 2, 3, 0]


MOE = {**ROW, "model": "Qwen3-235B-A22B", "source": "NVIDIA-NeMo/Megatron-Bridge 26.02", "ep": "8"}


def test_the_first_dense_layers_have_the_weights_that_the_row_gives():
    row = {
        **ROW, "model": "DeepSeek-V3", "layers": "61", "hidden": "7168", "heads": "128",
        "ffn": "18432", "n_experts": "256", "topk": "8", "moe_ffn": "2048", "n_shared_experts": "1",
        "first_dense_layers": "3", "mlp_kind": "gated", "step_time_s": "36", "ep": "64",
    }  # fmt: skip
    alike, case = (read_row({**row, "first_dense_layers": n}).case for n in ("0", "3"))
    assert (alike.dense_share, alike.more_weights, case.dense_share) == (0, 0, 3 / 61)
    # Three layers have an ffn of 18,432 in place of 256 experts, a shared one and a router.
    experts, dense = 3 * 7168 * 2048 * 257 + 7168 * 256, 3 * 7168 * 18432
    without, having = (
        each.layers * (float(block_weights(cases_of([each]))[0]) + each.more_weights)
        for each in (alike, case)
    )
    assert having == pytest.approx(without + 3 * (dense - experts))
    silent = read_row({**row, "ffn": "2048", "moe_ffn": ""}).case
    assert silent.more_weights == case.more_weights  # a token meets 9 x 2048


def test_notes_and_columns_say_how_experts_run():
    notes = "dispatcher DeepEP+UCCL; overlap_moe_expert_parallel_comm=off; ETP1"
    noted = read_row({**MOE, "notes": notes, "source": "lab"}).case
    assert (noted.dispatcher, noted.ep_overlap, noted.whole_experts) == ("deepep", "off", True)
    columns = {"moe_dispatcher": "alltoall", "ep_overlap": "on", "etp": "4", "token_drop": "1"}
    stated = read_row({**MOE, "notes": notes, **columns}).case
    assert (stated.dispatcher, stated.ep_overlap, stated.whole_experts) == ("alltoall", "on", False)
    assert stated.drops_tokens
    assert read_row({**MOE, "notes": "dispatcher NCCL alltoall"}).case.dispatcher == "alltoall"
    silent = read_row(MOE).case
    assert (silent.dispatcher, silent.ep_overlap, silent.drops_tokens) == ("any", "any", False)


def test_a_release_says_what_of_a_step_with_experts_is_a_graph():
    rack = {**MOE, "gpu": "GB200", "dtype": "mxfp8"}
    later = {"source": "NVIDIA-NeMo/Megatron-Bridge 26.06"}
    captured = read_row({**rack, **later}).case
    assert (captured.cuda_graphs, captured.ep_overlap) == ("iteration", "on")
    assert read_row({**rack, "release": "26.06"}).case.cuda_graphs == "iteration"
    assert read_row({**rack, **later, "cuda_graphs": "0"}).case.cuda_graphs == "none"
    assert read_row({**rack, **later, "ep_overlap": "off"}).case.ep_overlap == "off"
    for before in ({}, {**later, "dtype": "bf16"}):
        case = read_row({**rack, **before}).case
        assert (case.cuda_graphs, case.ep_overlap) == ("blocks", "any")
    assert read_row({**rack, "gpu": "B200"}).case.cuda_graphs == "none"
    assert read_row({**rack, "release": "25.09"}).case.cuda_graphs == "none"


def test_a_row_says_what_is_computed_again():
    named = read_row({**MOE, "recompute": "selective: layernorm+moe_act"}).case
    assert (named.selective_recompute, named.activation_recompute) == (False, 1)
    assert read_row({**MOE, "recompute": "selective"}).case.selective_recompute
    both = read_row({**MOE, "recompute": "selective: core_attn+moe_act"}).case
    assert (both.selective_recompute, both.activation_recompute) == (True, 1)
    assert read_row({**MOE, "recompute": "remat custom"}).case.full_recompute
    dense = read_row({**ROW, "recompute": "remat custom"}).case
    assert (dense.full_recompute, dense.ffn_recompute) == (0, 1)


def test_a_fit_finds_the_coefficients_that_made_the_times():
    rng = np.random.default_rng(5)
    truth = CENTRE + WIDTH * rng.normal(size=len(CENTRE)) * 0.7
    cases = [
        read_row(
            {
                **ROW,
                "step_time_s": "99",
                "hidden": str(h),
                "heads": str(h // 128),
                "mbs": str(b),
                "tp": str(t),
            }
        ).case
        for h in (1024, 2048, 4096, 8192)
        for b in (1, 2, 4)
        for t in (1, 2, 4, 8)
    ]
    x, sources = cases_of(cases), ["a"] * 24 + ["b"] * 24
    measured = predict(x, truth)
    fitted = fit(x, measured, sources, ["nemo"] * x.size)
    assert np.abs(np.log(predict(x, fitted.centre) / measured)).mean() < 0.03
    narrowing = np.sqrt(np.diag(fitted.covariance) / np.diag(PRIOR.covariance))
    assert narrowing[NAMES.index("gemm_4bit")] > 0.9 > narrowing[NAMES.index("gemm_ampere")]


def test_intervals_widen_where_nothing_was_measured():
    evidence = shipped_evidence()
    rows = [ROW, {**ROW, "gpu": "MI300X"}, {**ROW, "num_gpus": str(2**18), "gbs": str(2**20)}]
    x = cases_of([read_row(row).case for row in rows])
    known, unknown, far = log_sd(x, evidence.fit(), evidence.residual_sd)
    assert known < far and 1.5 * known < unknown
    plain, adapted = (
        cases_of([read_row(ROW).case]),
        cases_of([replace(read_row(ROW).case, frozen=True)]),
    )
    sd = [log_sd(one, evidence.fit(), evidence.residual_sd)[0] for one in (plain, adapted)]
    assert sd[1] ** 2 - sd[0] ** 2 == pytest.approx(UNFITTED_MODEL_SD["adapters"] ** 2, rel=0.05)
    graph = cases_of([replace(read_row(ROW).case, cuda_graphs="iteration")])
    own = model_variance(graph, slopes(graph, evidence.fit().centre), evidence.residual_sd)
    plain_own = model_variance(plain, slopes(plain, evidence.fit().centre), evidence.residual_sd)
    assert own[0] - plain_own[0] == pytest.approx(CAPTURED_STEP_SD**2, rel=0.01)
    low, high = bounds(np.array([2.0]), np.array([0.1]))
    assert low[0] < 2 < high[0] and low[0] * high[0] == pytest.approx(4)


def test_coefficients_survive_their_file(tmp_path: Path):
    x = cases_of([read_row({**ROW, "mbs": str(b)}).case for b in (1, 2, 4)])
    measured = predict(x, CENTRE + 0.1)
    fitted = fit(x, measured, ["a"] * 3, ["nemo"] * 3)
    missed = np.log(predict(x, fitted.centre) / measured)
    residual = residual_sd(x, missed, np.zeros(3), ["a"] * 3)
    stored = evidence_of_fit("three rows", fitted, residual, 3, 1)
    path = tmp_path / "coefficients.json"
    path.write_text(stored.model_dump_json())
    again = read_evidence(path).evidence
    assert isinstance(again, Evidence) and again == stored
    assert again.fit().centre == pytest.approx(fitted.centre, abs=1e-4)
    path.write_text("{}")
    with pytest.raises(UserError, match="does not contain coefficients"):
        read_evidence(path)


def test_shipped_coefficients_meet_what_they_were_fitted_to(reference_data: Path):
    rows, reasons = [], set[str]()
    with (reference_data / "references" / "measured_open.csv").open() as lines:
        for line in csv.DictReader(lines):
            try:
                rows.append(read_row(line))
            except UnsupportedRowError as reason:
                reasons.add(str(reason))
    dense = [row for row in rows if row.kind == "dense"]
    x, measured = cases_of([row.case for row in dense]), np.array([row.measured_s for row in dense])
    error = np.abs(predict(x, shipped_evidence().fit().centre) / measured - 1)
    assert len(dense) >= 700 and reasons == {NO_TIME, IMPOSSIBLE}
    assert error.mean() < 0.11 and np.median(error) < 0.09


def test_fine_tuning_packs_short_samples_and_adapts_the_attention():
    case = read_row({**ROW, "model": "Llama3 8b Finetuning LORA"}).case
    assert case.frozen and case.document == 512 and case.adapter_rank > 0
    assert case.adapter_widths == case.hidden + 3 * case.hidden
    assert read_row({**ROW, "model": "Llama3 8b SFT"}).case.document == 512
    assert read_row(ROW).case.document == 0


def test_fully_sharded_rows_say_so_in_their_notes():
    assert read_row({**ROW, "zero": "1", "notes": "container; FSDP=1"}).case.zero_stage == 3
    assert read_row({**ROW, "zero": "1", "notes": "FSDP=0"}).case.zero_stage == 1


def test_a_step_right_after_a_start_is_a_kind_of_its_own():
    assert read_row({**ROW, "notes": "iteration 7 (1st after restart)"}).kind == "first step"
    assert read_row({**ROW, "notes": "iteration 8"}).kind == "dense"


def test_experts_with_their_numbers_are_modelled():
    row = read_row({**ROW, "model": "Mixtral 8x7B", "num_experts": "8", "topk": "2", "ep": "4"})
    assert row.kind == "moe" and (row.case.experts, row.case.experts_per_token) == (8, 2)
    assert predict(cases_of([row.case]), shipped_evidence().fit().centre)[0] > 0


@pytest.mark.parametrize(
    ("model", "width", "gated"),
    [
        ("Yi-34B", 4.0, True), ("OLMo 7B", 4.0, True), ("Phi-3 mini", 4.0, True),
        ("phi-2", 4.0, False),
        ("GPT-OSS 120B", 1.0, True), ("Nemotron4 15b", 4.0, False), ("opt-13b", 4.0, False),
        ("house model", 2.6875, True), ("PaLM 540B", 4.0, True),
    ],
)  # fmt: skip
def test_a_gate_is_known_by_the_family_or_by_an_odd_width(model: str, width: float, gated: bool):
    assert is_gated(model, width) is gated


@pytest.mark.parametrize(
    ("gpu", "dtype", "emulated"),
    [
        ("A100-SXM-80GB", "fp8", True), ("H100-SXM-80GB", "mxfp8", True),
        ("H100-SXM-80GB", "nvfp4", True), ("V100-SXM2-32GB", "fp8", True),
        ("H100-SXM-80GB", "fp8", False), ("GB200-186GB", "nvfp4", False),
    ],
)  # fmt: skip
def test_what_a_device_does_not_multiply_in_is_multiplied_in_16_bit(
    gpu: str, dtype: str, emulated: bool
):
    narrow, wide = (read_row({**ROW, "gpu": gpu, "dtype": d}) for d in (dtype, "bf16"))
    assert (narrow.case.peak_narrow == 0) is emulated and wide.case.peak_narrow == 0
    assert narrow.case.peak_16bit == wide.case.peak_16bit
    assert narrow.case.assumed_device is (emulated or wide.case.assumed_device)
    fast, usual = predict(
        cases_of([narrow.case, wide.case]), shipped_evidence().fit().centre
    ).tolist()
    assert fast == usual if emulated else fast < usual


DEEPSEEK_REPORT = {
    "id": "report", "source": "arXiv 2412.19437", "model": "DeepSeek-V3", "layers": "61",
    "hidden": "7168", "ffn": "18432", "heads": "128", "kv_heads": "128", "vocab": "129280",
    "seq_len": "4096", "gpu": "H800-SXM-80GB", "num_gpus": "2048", "gbs": "15360", "pp": "16",
    "ep": "64", "zero": "1", "dtype": "fp8", "recompute": "selective", "step_time_s": "19.9",
    "attention_impl": "flash MLA", "inter_node_net": "8x400Gb/s IB", "n_experts": "256",
    "intra_node_net": "NVLink 160 GB/s a direction", "topk": "8", "moe_ffn": "2048",
    "n_shared_experts": "1", "first_dense_layers": "3", "notes": "DualPipe; own kernels",
}  # fmt: skip
"""DeepSeek V3 on 2,048 H800: 180,000 GPU hours per trillion tokens, 3.7 days (abstract, section 1),
so 19.9 s for 15,360 samples of 4,096 tokens."""


def test_the_training_of_deepseek_v3_is_predicted_from_what_its_report_states():
    row = read_row(DEEPSEEK_REPORT)
    assert (row.case.expert_groups, row.case.groups_per_token) == (8, 4)
    assert (row.case.dispatch_bytes, row.case.ep_overlap) == (1, "on")
    assert (row.case.implementation, row.case.schedule) == ("fused", "zero-bubble")
    evidence, x = shipped_evidence(), cases_of([row.case])
    fitted = evidence.fit()
    predicted = predict(x, fitted.centre)
    low, high = bounds(predicted, log_sd(x, fitted, evidence.residual_sd, evidence.levels))
    assert abs(predicted[0] / row.measured_s - 1) < 0.25
    assert low[0] < row.measured_s < high[0]


def test_a_forced_balance_does_not_limit_routing_to_groups():
    forced = {**DEEPSEEK_REPORT, "notes": "fake balanced gate; mock data"}
    assert read_row(forced).case.expert_groups == 1


def test_a_row_with_only_a_rate_has_the_step_time_of_its_tokens():
    rate = {**ROW, "step_time_s": "", "tokens_per_s": "283706"}
    assert read_row(rate).measured_s == pytest.approx(512 * 2048 / 283706)
    with pytest.raises(UnsupportedRowError, match=NO_TIME):
        read_row({**rate, "gbs": ""})
