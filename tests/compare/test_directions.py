"""Every metric says which way it improves, so that a gate cannot pass a regression as a gain."""

from __future__ import annotations

import pytest

from paceline.compare.metric_comparison import metric_verdict
from paceline.core.metrics import METRICS, metric_class


@pytest.mark.parametrize("name", METRICS)
def test_what_a_metric_follows_is_a_metric(name: str):
    followed = metric_class(name).follows
    assert followed is None or followed in METRICS


@pytest.mark.parametrize(
    ("name", "higher", "lower"),
    [
        ("step_time_s", "slower", "faster"),
        ("tokens_per_s", "faster", "slower"),
        ("memory_reserved_bytes", "worse", "better"),
        ("loss_last", "differs", "differs"),
    ],
)
def test_a_change_is_called_by_what_it_means(name: str, higher: str, lower: str):
    assert (metric_verdict(name, "higher"), metric_verdict(name, "lower")) == (higher, lower)
    assert (metric_verdict(name, "same"), metric_verdict(name, "undecided")) == (
        "same",
        "undecided",
    )
    assert metric_class(name).is_speed == (higher in ("slower", "faster"))
    assert (metric_class(name).better is None) == (higher == "differs")
