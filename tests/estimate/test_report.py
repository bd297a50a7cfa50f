"""An estimate as a document: what its figures and sentences say."""

from __future__ import annotations

import pytest

from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.measured_step import with_measurement
from paceline.estimate.report import (
    EstimateOutput,
    comparison_sentence,
    estimate_document,
    rates,
    setup,
)
from paceline.estimate.request import EstimateRequest
from paceline.estimate.scenarios import Ratio, compare_scenarios
from paceline.estimate.single_estimate import Estimate, estimate
from paceline.report.document import Document


def found(recipe: str = "llama31-8b", devices: int = 8, **changes: object) -> Estimate:
    request = EstimateRequest(recipe, "H100-SXM", devices)
    return estimate(request, shipped_evidence()).model_copy(update=changes)


def document(one: Estimate) -> Document:
    return estimate_document(EstimateOutput([one]))


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(12_345.6, "12,346"), (1_234.5, "1,234"), (43.219, "43.22"), (0.5, "0.5"), (1e-5, "0.00001")],
)
def test_samples_a_second_are_never_in_exponent_form(rate: float, shown: str):
    assert rates(found("flux1-schnell", samples_per_s=rate))[0] == f"{shown} samples/s"


def test_scenarios_are_compared_with_separators_in_their_devices():
    first, second = (
        estimate(EstimateRequest("llama31-70b", device, 2048), shipped_evidence())
        for device in ("H100", "B200")
    )
    comparison = compare_scenarios(first, second, Ratio(0.5, 0.4, 0.6))
    line = comparison_sentence(first, second, comparison)
    assert line.startswith(
        "2,048 x B200 compared with 2,048 x H100-SXM: tokens/s x2.00 (1.67-2.50), "
    )


def test_the_setup_has_the_batch_of_a_step():
    """Recipes whose batch grows with the devices would otherwise seem to do the same step."""
    for devices, batch in ((8, "128"), (64, "1,024")):
        each = found(devices=devices)
        assert setup(each)[2:4] == ("seq 8,192", f"global batch {batch} sequences")
        assert each.global_batch / each.step_time_s == pytest.approx(each.samples_per_s)
    one = found(global_batch=1, micro_batch=2, recompute="full")
    assert "global batch 1 sequence" in setup(one)
    assert setup(one)[1].endswith("zero 1 micro-batch 2 recompute full")
    assert setup(found("flux1-schnell"))[3].endswith(" samples")


def test_the_setup_has_the_software_that_was_asked_for():
    for stack, shown in (
        ("nemo@26.02", "software nemo@26.02 (fused)"),
        ("torch", "software torch"),
    ):
        request = EstimateRequest("llama31-8b", "H100-SXM", 8, software=stack)
        assert setup(estimate(request, shipped_evidence()))[-1] == shown


def test_seconds_keep_their_digits_and_short_trainings_are_not_of_no_days():
    short = found(devices=16_384, step_time_s=12.4, low_s=11.0, high_s=13.81)
    _, _, step, _, training, _ = document(short).figures
    assert (step.value, step.interval) == ("12.40 s", "11.00 to 13.81 s (80%)")
    assert training.value == "0.072 days" and training.details[0].startswith("1.00T tokens, ")


def test_steps_of_hours_are_in_whole_seconds():
    hours = found(step_time_s=12_340.0, low_s=11_000.0, high_s=13_810.0)
    told = document(with_measurement(hours, 12_345.0, "as stated"))
    assert told.answer[0].startswith(
        "Measured 12,345 s per step (as stated), 1.000 times the estimate of 12,340 s and inside "
    )
    assert told.figures[2].value == "12,340 s"


@pytest.mark.parametrize(("device", "whose"), [("TPU-v7", "TPU-v7"), ("cpu", "this CPU")])
def test_unknown_energy_is_reported_with_the_reason(device: str, whose: str):
    known = found()
    assert known.training_cost
    assert f"up to {known.training_cost.energy_kwh:,.0f} kWh" in document(known).figures[4].details
    cost = known.training_cost.model_copy(update={"energy_kwh": None})
    blind = known.model_copy(update={"training_cost": cost, "device": device})
    words = f"energy unknown: no data sheet states the power of {whose}"
    assert words in document(blind).figures[4].details


def test_the_interval_says_for_how_many_sources_it_was_right():
    shipped, one = shipped_evidence(), found()
    inside = shipped.unseen_sources_in_interval
    assert inside is not None and 0.75 < inside / shipped.sources < 0.95
    assert (one.unseen_sources, one.unseen_sources_in_interval) == (shipped.sources, inside)
    sentence = f"contains most steps of {inside} of {shipped.sources} sources"
    assert any(sentence in note for note in document(one).notes)
    untested = one.model_copy(update={"unseen_sources": None, "unseen_sources_in_interval": None})
    assert not any("contains most steps" in note for note in document(untested).notes)
