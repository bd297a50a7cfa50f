"""Quantities as people write them."""

from __future__ import annotations

import pytest

from paceline.core.quantity import parse_count, parse_duration, parse_figure, parse_money


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("15T", 15e12),
        ("8k", 8e3),
        ("10,500", 10_500),
        ("1.5e12", 1.5e12),
        ("1.5 trillion", 1.5e12),
        ("15T tokens", 15e12),
        ("2_000", 2000),
        ("1.3B", 1.3e9),
    ],
)
def test_counts(text: str, value: float):
    assert parse_count(text, "token") == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("2.5", (2.5, "")), ("$2.5", (2.5, "$")), ("$1M", (1e6, "$")), ("1.2k€", (1200, "€"))],
)
def test_money(text: str, amount: tuple[float, str]):
    assert parse_money(text) == amount


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30 days", 2_592_000), ("12h", 43_200), ("10m", 600), ("600", 600), ("5 years", 157_680_000)],
)
def test_durations(text: str, seconds: float):
    assert parse_duration(text, 1.0) == seconds


def test_a_plain_duration_has_the_unit_of_its_option():
    assert parse_duration("50k", 3600.0) == 50_000 * 3600


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("54.1%", "mfu", 0.541),
        ("1249TFLOP/s", "flops_per_s_per_device", 1.249e15),
        ("400 TFLOP/s/GPU", "flops_per_s_per_device", 4e14),
        ("400 TFLOPS", "flops_per_s_per_device", 4e14),
        ("10,500 tokens/s/GPU", "tokens_per_s_per_device", 10_500),
        ("10.5k tok/s/gpu", "tokens_per_s_per_device", 10_500),
        ("12.5s", "step_time_s", 12.5),
        ("850 ms", "step_time_s", 0.85),
    ],
)
def test_figures(text: str, kind: str, value: float):
    figure = parse_figure(text)
    assert figure.kind == kind and figure.value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10,500", "has no unit"),
        ("10,500 tokens/s", "could be of one GPU or of all"),
        ("5 parsecs", "has an unknown unit"),
        ("fast", "is not a quantity"),
        ("$5", "is not a positive figure"),
    ],
)
def test_figures_that_are_not_understood(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        parse_figure(text)


@pytest.mark.parametrize("text", ["", "15X", "$15T", "-3", "1e999"])
def test_counts_that_are_not_understood(text: str):
    with pytest.raises(ValueError):
        parse_count(text)
