from __future__ import annotations

import pytest

from paceline.audit.quantity import read_flops_per_s, read_quantity
from paceline.core.errors import UserError


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("54.1%", "mfu", 0.541),
        ("54.1 %", "mfu", 0.541),
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
    quantity = read_quantity(text, "the figure")
    assert (quantity.kind, quantity.value) == (kind, pytest.approx(value))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("54.1", "no unit"),
        ("0.541", "no unit"),
        ("101%", "more than the peak"),
        ("abc", "positive figure"),
        ("", "positive figure"),
        ("0%", "positive figure"),
        (".%", "positive figure"),
        ("12GB/s", "positive figure"),
        ("1e999s", "positive figure"),
    ],
)
def test_a_figure_that_could_be_anything_is_refused(text: str, complaint: str):
    with pytest.raises(UserError, match=complaint):
        read_quantity(text, "the figure")


@pytest.mark.parametrize("text", ["989e12", "989TFLOP/s", "0.989 PFLOPS", "989,000 gflops"])
def test_a_peak_may_be_written_in_several_ways(text: str):
    assert read_flops_per_s(text, "--peak") == pytest.approx(989e12)


@pytest.mark.parametrize("text", ["989", "54%", "3s", "x", "-1e12"])
def test_a_peak_that_cannot_be_one_is_refused(text: str):
    with pytest.raises(UserError, match="989TFLOP/s"):
        read_flops_per_s(text, "--peak")
