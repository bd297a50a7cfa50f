"""A recipe on devices that are not here: its time and what it rests on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.errors import UserError
from paceline.core.run import RunSettings
from paceline.estimate.costs import Failures, Prices
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.request import EstimateRequest
from paceline.estimate.run_case import Software, case_of
from paceline.estimate.single_estimate import estimate

LLAMA_70B = EstimateRequest(
    "llama31-70b", "H100-SXM", 64, intra_link="NVLink4", inter_link="InfiniBand-NDR"
)


def test_the_published_step_of_the_70b_lies_in_the_interval():
    found = estimate(LLAMA_70B, shipped_evidence())
    assert found.low_s < 14.72 < found.high_s and found.step_time_s == pytest.approx(
        14.72, rel=0.05
    )
    assert found.mfu == pytest.approx(0.541, rel=0.07)
    assert sum(found.parts.values()) == pytest.approx(found.step_time_s)
    assert not found.notes and "published" in found.provenance.title
    assert (found.provenance.coefficients, found.provenance.links) == ("public prior", "stated")
    assert found.waterfall[-1].flops_per_s == pytest.approx(found.flops_per_s_per_device)


@pytest.mark.parametrize(
    ("recipe", "devices"),
    [
        ("llama31-8b", 8), ("llama2-70b-lora", 8), ("flux1-schnell", 64), ("gpt-1b3", 8),
        ("opt-350m-sft", 8), ("opt-13b-sft", 8),
    ],
)  # fmt: skip
def test_every_kind_of_model_can_be_estimated(recipe: str, devices: int):
    found = estimate(EstimateRequest(recipe, "H100", devices), shipped_evidence())
    assert 0 < found.low_s < found.step_time_s < found.high_s
    assert found.mfu is not None and 0.05 < found.mfu < 0.75


@pytest.mark.parametrize(
    ("recipe", "headline"),
    [
        ("opt-350m-sft-tiny", "samples_per_s"), ("flux1-schnell", "samples_per_s"),
        ("tiny-llama", "tokens_per_s"),
    ],
)  # fmt: skip
def test_an_estimate_is_led_by_the_rate_that_a_run_is_led_by(recipe: str, headline: str):
    request = EstimateRequest(recipe, "H100", 8)
    found = estimate(request, shipped_evidence())
    assert found.headline == headline == RunSettings.of(request.spec).headline


def test_adapters_train_faster_than_the_whole_model():
    spec = EstimateRequest("llama2-70b-lora", "H100", 8).spec
    case = case_of(spec, LLAMA_70B.machine, Software())
    assert case.frozen and case.gated and case.layers == 80


def test_fp32_is_slower_than_16_bit():
    whole = estimate(replace(LLAMA_70B, overrides=("training.dtype=fp32",)), shipped_evidence())
    assert whole.mfu is not None and whole.mfu < 1
    assert whole.step_time_s > 5 * estimate(LLAMA_70B, shipped_evidence()).step_time_s


@pytest.mark.parametrize(
    ("fp8_recipe", "words"),
    [
        ("tensorwise", ()),
        ("rowwise", ("too fast",)),
        ("rowwise_with_gw_hp", ("in bf16", "too fast")),
    ],
)
def test_scales_that_nobody_timed_are_said_to_be_timed_as_others(
    fp8_recipe: str, words: tuple[str, ...]
):
    set_to = ("training.dtype=fp8", f"training.fp8_recipe={fp8_recipe}")
    notes = estimate(replace(LLAMA_70B, overrides=set_to), shipped_evidence()).notes
    assert len(notes) == bool(words) and all(word in "".join(notes) for word in words)


@pytest.mark.parametrize(
    ("device", "bytes_per_s"),
    [("A100-PCIe-80GB", 31.5e9), ("H100-PCIe", 63e9), ("H100-SXM", 450e9), ("MI300X", 448e9)],
)
def test_usual_links_are_those_of_the_device(device: str, bytes_per_s: float):
    here = EstimateRequest("llama31-8b", device, 8).machine
    assert here.intra_bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)


def test_usual_links_are_told():
    found = estimate(replace(LLAMA_70B, intra_link=None, inter_link=None), shipped_evidence())
    assert any("intra-node links are assumed" in note for note in found.notes)
    assert any("the network is assumed" in note for note in found.notes)


def test_the_bill_counts_tokens_money_and_failures():
    request = replace(
        LLAMA_70B,
        tokens=15e12,
        prices=Prices(per_device_hour=2.0),
        failures=Failures(device_mtbf_h=5e4),
    )
    found = estimate(request, shipped_evidence()).training_cost
    assert found is not None and found.goodput is not None and found.energy_kwh is not None
    assert found.cost == pytest.approx(2 * found.device_hours)
    assert found.days == pytest.approx(found.device_hours / 64 / 24)


def test_the_automatic_dtype_is_the_one_that_a_run_takes():
    old, new = (
        estimate(EstimateRequest("tiny-llama", d, 8), shipped_evidence())
        for d in ("V100-32GB", "H100")
    )
    assert (old.dtype, new.dtype) == ("fp32", "bf16")
    assert EstimateRequest("tiny-llama", "V100-32GB", 8).spec_of_any_layout.training.dtype == "fp32"


def test_a_link_counts_as_stated_only_where_it_can_be():
    for swapped, words in (
        ({"intra_link": "InfiniBand-NDR"}, "--intra InfiniBand-NDR: is a network between nodes"),
        ({"inter_link": "NVLink4"}, "--inter NVLink4: is a link inside a node"),
    ):
        with pytest.raises(UserError, match=words):
            estimate(replace(LLAMA_70B, **swapped), shipped_evidence())  # type: ignore[arg-type]
    usual = estimate(replace(LLAMA_70B, intra_link=None, inter_link=None), shipped_evidence())
    assert usual.provenance.links != "stated" and usual.provenance.network != "stated"
    rates = estimate(
        replace(LLAMA_70B, intra_link="450 GB/s", inter_link="8x400 Gb/s"), shipped_evidence()
    )
    assert (rates.provenance.links, rates.provenance.network) == ("stated", "stated")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "Wonder-9000"}, "is not in the catalog"),
        ({"device": "cpu"}, "is not calibrated in"),
        ({"devices": 63}, "is not a multiple of 8 devices per node"),
        ({"devices": 24}, "does not divide 24 devices"),
        ({"overrides": ("dtype=nvfp4",)}, "does not compute in nvfp4"),
        ({"device": "V100-32GB"}, "does not compute in bf16.*training.dtype=fp16"),
    ],
)
def test_what_cannot_be_estimated_says_why(changes: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        estimate(replace(LLAMA_70B, **changes), shipped_evidence())  # type: ignore[arg-type]
