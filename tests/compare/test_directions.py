"""Every metric says which way it improves, so that a gate cannot pass a regression as a gain."""

from __future__ import annotations

import pytest

from paceline.compare.contrast import word
from paceline.compare.directions import (
    COSTS,
    MEAN_RATES,
    NEUTRAL,
    RATES,
    TIMES,
    better,
    follows,
    is_speed,
)
from paceline.core.metrics import METRICS


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_has_exactly_one_direction(name: str):
    kinds = [name in kind for kind in (TIMES, RATES, MEAN_RATES, COSTS, NEUTRAL)]
    assert sum(kinds) + name.startswith("memory_") == 1
    assert follows(name) is None or follows(name) in METRICS


def test_nothing_unknown_is_called_a_metric():
    assert set(METRICS) >= TIMES | RATES | MEAN_RATES | COSTS | NEUTRAL


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
    assert (word(name, "higher"), word(name, "lower")) == (higher, lower)
    assert (word(name, "same"), word(name, "undecided")) == ("same", "undecided")
    assert is_speed(name) == (higher in ("slower", "faster"))
    assert (better(name) is None) == (higher == "differs")
