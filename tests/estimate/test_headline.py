"""The answer of an estimate in a line."""

from __future__ import annotations

import pytest

from paceline.cli.estimate_output import text
from paceline.estimate.answer import estimate
from paceline.estimate.explanation import beside, sentence
from paceline.estimate.fit.evidence import shipped
from paceline.estimate.headline import beside_line, headline, rates, setup, speed
from paceline.estimate.offers import Ratio, against
from paceline.estimate.page import estimate_cards, estimate_html
from paceline.estimate.question import Question


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(12_345.6, "12,346"), (1_234.5, "1,234"), (43.219, "43.22"), (0.5, "0.5"), (1e-5, "0.00001")],
)
def test_samples_a_second_are_never_in_exponent_form(rate: float, shown: str):
    found = estimate(Question("flux1-schnell", "H100", 8), shipped())
    fast = found.model_copy(update={"samples_per_s": rate})
    assert speed(fast) == shown and rates(fast)[0] == f"{shown} samples/s"


def test_offers_beside_each_other_have_their_devices_with_separators():
    first, second = (
        estimate(Question("llama31-70b", device, 2048), shipped()) for device in ("H100", "B200")
    )
    line = beside_line(first, second, against(first, second, Ratio(0.5, 0.4, 0.6)))
    assert line.startswith("2,048 x B200 against 2,048 x H100-SXM: tokens/s 2.00 (1.67-2.50), ")


def test_a_step_is_told_with_its_batch():
    """Recipes whose batch grows with the devices would otherwise seem to do the same step."""
    for devices, batch in ((8, "128"), (64, "1,024")):
        found = estimate(Question("llama31-8b", "H100-SXM", devices), shipped())
        assert f"seq 8,192 · global batch {batch} sequences" in setup(found)
        assert (f"{found.global_batch:,}", found.seq_len) == (batch, 8192)
        assert found.global_batch / found.step_time_s == pytest.approx(found.samples_per_s)
    one = found.model_copy(update={"global_batch": 1, "devices": 1024})
    assert "1,024 x H100-SXM" in setup(one) and "global batch 1 sequence · " in setup(one)
    assert estimate_cards(one)[0].lines[0] == "global batch 1 sequence"
    full = one.model_copy(update={"micro_batch": 2, "recompute": "full"})
    assert "zero 1 micro-batch 2 recompute full · seq" in setup(full)
    images = estimate(Question("flux1-schnell", "H100-SXM", 8), shipped())
    assert setup(images).split(" · ")[-2].endswith(" samples")


def test_the_software_that_was_asked_for_is_told():
    found = estimate(Question("llama31-8b", "H100-SXM", 8, stack="nemo@26.02"), shipped())
    assert setup(found).endswith(" · nemo@26.02 (fused)") and found.software == "nemo@26.02"
    assert "stack nemo@26.02 (fused)" in estimate_html([found], [], [""]).replace("\xa0", " ")
    unnamed = estimate(Question("llama31-8b", "H100-SXM", 8, stack="torch"), shipped())
    assert setup(unnamed).endswith(" sequences · torch")


def test_seconds_keep_their_digits_and_short_trainings_are_not_of_no_days():
    found = estimate(Question("llama31-8b", "H100-SXM", 16_384), shipped())
    line = headline(found.model_copy(update={"step_time_s": 12.4, "low_s": 11.0, "high_s": 13.81}))
    assert "step 12.40 s   80 % interval 11.00-13.81 s" in line
    assert "0.071 days for 1.00T tokens" in line


def test_steps_of_hours_are_told_in_whole_seconds_everywhere():
    found = estimate(Question("llama31-8b", "H100-SXM", 8), shipped())
    hours = {"step_time_s": 12_340.0, "low_s": 11_000.0, "high_s": 13_810.0}
    long = beside(found.model_copy(update=hours), 12_345.0, "as stated")
    told = text(long)
    assert "step 12,340 s   80 % interval 11,000-13,810 s" in told
    assert "measured 12,345 s (as stated)" in told and "e+04" not in told
    page = estimate_html([long], [], [told]).replace("\N{NO-BREAK SPACE}", " ")
    assert "Measured were 12,345 s a step" in page
    assert "Expected 12,340 s a step (80 % interval 11,000-13,810 s)" in sentence(long)


@pytest.mark.parametrize(("device", "whose"), [("TPU-v7", "TPU-v7"), ("cpu", "this processor")])
def test_page_and_text_say_why_energy_is_not_known(device: str, whose: str):
    found = estimate(Question("llama31-8b", "H100-SXM", 8), shipped())
    assert found.bill
    most = f"at most {found.bill.energy_kwh:,.0f} kWh"
    assert most in estimate_cards(found)[2].lines and most in text(found)
    bill = found.bill.model_copy(update={"energy_kwh": None})
    blind = found.model_copy(update={"bill": bill, "device": device})
    words = f"energy not known: no data sheet states the power of {whose}"
    assert words in estimate_cards(blind)[2].lines and words in text(blind)
