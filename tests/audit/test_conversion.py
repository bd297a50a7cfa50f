"""A published figure in another convention and against another peak."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.audit.conversion import (
    Peaks,
    SpeedFigure,
    convert,
    from_tokens_per_s,
    parse_quantity,
    read_flops_per_s,
    resolve_peaks,
)
from paceline.core.errors import UserError
from paceline.core.flops import CONVENTIONS, RECOMPUTE_SUFFIX, FlopsInput, flops_per_token
from paceline.core.layout import Recompute
from paceline.core.rates import tokens_per_s
from tests.core.shapes import (
    GPT_1B3_PADDED,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    OPT_13B,
    OPT_13B_LORA,
)

X = FlopsInput(LLAMA_70B, 8192)
UNKNOWN = Peaks(None, None)
names = st.sampled_from(sorted(CONVENTIONS))


@pytest.mark.parametrize(
    ("shape", "ratio"), [(LLAMA_8B, 0.889), (LLAMA_70B, 0.933), (LLAMA_405B, 0.961)]
)
def test_causal_is_less_than_full_attention_by_the_published_ratios(shape: object, ratio: float):
    x = FlopsInput(shape, 8192)  # type: ignore[arg-type]
    done = convert(SpeedFigure("mfu", 0.541), "full-attention", "causal", x, UNKNOWN)
    assert done.ratio == pytest.approx(ratio, abs=5e-4)
    assert done.converted.mfu == pytest.approx(0.541 * done.ratio)
    assert done.converted.flops_per_s_per_device is None and "same, unknown peak" in done.notes[0]


def test_a_sparse_peak_is_exchanged_for_the_dense_one():
    done = convert(SpeedFigure("mfu", 0.27), "causal", "causal", X, Peaks(1979e12, 989e12))
    assert done.converted.mfu == pytest.approx(0.27 * 1979 / 989)
    assert done.published.flops_per_s_per_device == done.converted.flops_per_s_per_device


def test_flops_per_second_convert_without_a_peak():
    done = convert(
        SpeedFigure("flops_per_s_per_device", 1249e12),
        "full-attention",
        "causal",
        FlopsInput(LLAMA_8B, 8192),
        UNKNOWN,
    )
    assert done.converted.flops_per_s_per_device == pytest.approx(1110e12, rel=1e-3)
    assert done.converted.mfu is None and done.notes == ()


@given(names, names, st.floats(0.01, 0.4), st.sampled_from(["none", "full"]))
def test_there_and_back_gives_the_figure_again(
    given_: str, wanted: str, share: float, recompute: str
):
    x = FlopsInput(LLAMA_70B, 8192, recompute)  # type: ignore[arg-type]
    converted = convert(
        SpeedFigure("mfu", share), given_, wanted, x, Peaks(1e15, 2e15)
    ).converted.mfu
    assert converted is not None
    back = convert(
        SpeedFigure("mfu", converted), wanted, given_, x, Peaks(2e15, 1e15)
    ).converted.mfu
    assert back == pytest.approx(share)


def test_recomputed_work_is_counted_only_when_asked_for():
    x = FlopsInput(LLAMA_8B, 8192, "full")
    plain = convert(SpeedFigure("mfu", 0.4), "causal", "causal", x, UNKNOWN)
    counted = convert(SpeedFigure("mfu", 0.4), "causal", "causal" + RECOMPUTE_SUFFIX, x, UNKNOWN)
    assert plain.ratio == 1 and 1.3 < counted.ratio < 4 / 3 + 1e-9
    assert (plain.converted.share, counted.converted.share) == ("MFU", "HFU")


@pytest.mark.parametrize(
    ("step_time_s", "target", "recompute", "tflops", "share"),
    [
        (29, "six-n+recompute", "full", 47.0, "HFU"),
        (29, "six-n", "full", 35.3, "MFU"),
        (23, "six-n", "full", 44.4, "MFU"),
        (23, "six-n", "none", 44.4, "MFU"),
        (29, "narayanan+recompute", "full", 53.7, "HFU"),
        (29, "narayanan-hw", "full", 53.7, "HFU"),
        (29, "narayanan", "full", 41.0, "MFU"),
    ],
)
def test_a_name_counts_recomputation_only_where_it_says_so(
    step_time_s: float, target: str, recompute: Recompute, tflops: float, share: str
):
    x = FlopsInput(GPT_1B3_PADDED, 2048, recompute, nominal_parameters=1.3e9)
    rate = tokens_per_s(x.seq_len, 512, step_time_s) / 8
    side = from_tokens_per_s(rate, target, x, UNKNOWN).converted
    assert side.flops_per_s_per_device == pytest.approx(tflops * 1e12, rel=2e-3)
    assert side.share == share and (share == "HFU") is side.convention.endswith(RECOMPUTE_SUFFIX)


def test_a_step_time_gives_the_cell_of_a_published_table():
    peaks = Peaks(989.5e12, 989.5e12)
    rate = tokens_per_s(X.seq_len, 128, 14.72) / 64
    done = from_tokens_per_s(rate, "full-attention", X, peaks)
    assert done.converted.mfu == pytest.approx(0.5415, abs=1e-4)


def test_formula_and_source_stand_with_the_result():
    done = convert(SpeedFigure("mfu", 0.4), "full-attention", "palm", X, UNKNOWN)
    assert "12 L (a d) s" in done.published.formula and "NeMo" in done.published.source
    assert "arXiv:2204.02311" in done.converted.source
    assert done.converted.flops_per_token == flops_per_token("palm", X)


def test_peaks_come_from_the_device_where_they_are_not_stated():
    assert resolve_peaks("H100", "bf16", None, None) == Peaks(989.5e12, 989.5e12)
    assert resolve_peaks("H100", "fp8", 3958e12, None) == Peaks(3958e12, 1979e12)
    assert resolve_peaks(None, None, 1979e12, None) == Peaks(1979e12, 1979e12)
    assert resolve_peaks(None, None, None, None) == UNKNOWN


@pytest.mark.parametrize(
    ("device", "wanted", "complaint"),
    [
        ("H100", 1979e12, "is the sparse peak of H100-SXM"),
        ("cpu", None, "has no known peak"),
        ("V100", None, "V100-SXM2-32GB in bf16: has no known peak; allowed: fp32, fp16"),
        ("RTX9999", None, "is not in the catalog"),
    ],
)
def test_a_peak_that_cannot_be_reached_or_known_is_refused(
    device: str, wanted: float | None, complaint: str
):
    with pytest.raises(UserError, match=complaint):
        resolve_peaks(device, None, None, wanted)


@pytest.mark.parametrize(
    ("given_", "wanted", "x", "share", "complaint"),
    [
        ("full", "causal", X, 0.4, "--from full: is not a FLOPs convention.*full-attention"),
        (
            "causal",
            "casual",
            X,
            0.4,
            "--to casual: is not a FLOPs convention.*did you mean 'causal'",
        ),
        (
            "causal",
            "causal+recompute",
            X,
            0.4,
            "needs the activation checkpointing mode.*or use causal",
        ),
        ("six-n", "causal", FlopsInput(OPT_13B, 512, "none", OPT_13B_LORA), 0.4, "LoRA's frozen"),
        ("causal", "full-attention", FlopsInput(LLAMA_8B, 65536), 0.9, "the peak"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_reason(
    given_: str, wanted: str, x: FlopsInput, share: float, complaint: str
):
    with pytest.raises(UserError, match=complaint):
        convert(SpeedFigure("mfu", share), given_, wanted, x, Peaks(1e15, 1e15))


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("54.1%", "mfu", 0.541),
        ("54.1%", "mfu", 0.541),
        ("14.72s", "step_time_s", 14.72),
        ("207.5 ms", "step_time_s", 0.2075),
        ("1249TFLOP/s", "flops_per_s_per_device", 1249e12),
        ("1,249 tflops", "flops_per_s_per_device", 1249e12),
        ("1.249PFLOPS", "flops_per_s_per_device", 1249e12),
        ("1249 TFLOPs/GPU", "flops_per_s_per_device", 1249e12),
        ("1.2e15FLOP/s", "flops_per_s_per_device", 1.2e15),
    ],
)
def test_a_figure_is_known_by_its_unit(text: str, kind: str, value: float):
    quantity = parse_quantity(text, "the figure")
    assert (quantity.kind, quantity.value) == (kind, pytest.approx(value))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("54.1", "no unit"),
        ("0.541", "no unit"),
        ("101%", "the peak"),
        ("abc", "not a quantity"),
        ("", "not a quantity"),
        ("0%", "positive figure"),
        (".%", "not a quantity"),
        ("12GB/s", "unknown unit"),
        ("1e999s", "too large"),
    ],
)
def test_a_figure_that_could_be_anything_is_refused(text: str, complaint: str):
    with pytest.raises(UserError, match=complaint):
        parse_quantity(text, "the figure")


@pytest.mark.parametrize("text", ["989e12", "989TFLOP/s", "0.989 PFLOPS", "989,000 gflops"])
def test_a_peak_may_be_written_in_several_ways(text: str):
    assert read_flops_per_s(text, "--peak") == pytest.approx(989e12)


@pytest.mark.parametrize("text", ["989", "54%", "3s", "x", "-1e12"])
def test_a_peak_that_cannot_be_one_is_refused(text: str):
    with pytest.raises(UserError, match="989TFLOP/s"):
        read_flops_per_s(text, "--peak")
