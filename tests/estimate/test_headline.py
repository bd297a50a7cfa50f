"""The answer of an estimate in a line."""

from __future__ import annotations

import pytest

from paceline.estimate.answer import estimate
from paceline.estimate.fit.evidence import shipped
from paceline.estimate.headline import rates, speed
from paceline.estimate.question import Question


@pytest.mark.parametrize(
    ("rate", "text"), [(12_345.6, "12,346"), (1_234.5, "1,234"), (43.219, "43.22"), (0.5, "0.5000")]
)
def test_samples_a_second_are_never_in_exponent_form(rate: float, text: str):
    found = estimate(Question("flux1-schnell", "H100", 8), shipped())
    fast = found.model_copy(update={"samples_per_s": rate})
    assert speed(fast) == text and rates(fast)[0] == f"{text} samples/s"
