"""Budgets: what a text means, and what is left of it."""

from __future__ import annotations

import pytest

from paceline.core.errors import UserError
from paceline.layouts.tune.search import Budget, parse_budget


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("10m", Budget(seconds=600)),
        ("90s", Budget(seconds=90)),
        ("1.5h", Budget(seconds=5400)),
        ("20 trials", Budget(runs=20)),
        ("1 trial", Budget(runs=1)),
        (" 12 RUNS ", Budget(runs=12)),
        ("5 min", Budget(seconds=300)),
    ],
)
def test_a_time_or_a_number(text: str, budget: Budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "text",
    [
        "",
        "20",
        "m",
        "0m",
        "-5m",
        "0 trials",
        "1.5 trials",
        "ten trials",
        "10 weeks",
        "1e3s",
        "nan s",
        "99999999 trials",
        "10m 5s",
    ],
)
def test_what_is_no_budget_is_refused_with_what_is(text: str):
    with pytest.raises(UserError, match="is not a budget") as refused:
        parse_budget(text)
    assert "20 trials" in str(refused.value.allowed)


def test_runs_are_counted_down():
    assert [Budget(runs=2).runs_left([1.0] * n) for n in range(4)] == [2, 1, 0, 0]


def test_time_is_left_for_as_many_runs_as_take_what_runs_took():
    assert Budget(seconds=100).runs_left([]) == 1
    assert Budget(seconds=100).runs_left([10.0, 10.0, 30.0]) == 5
    assert Budget(seconds=100).runs_left([60.0]) == 0
    assert Budget(seconds=100).runs_left([99.0, 20.0]) == 0


def test_runs_that_fail_soon_do_not_stretch_it():
    took, whole = [2.0, 2.0, 2.0, 60.0], [60.0]
    assert Budget(seconds=100).runs_left(took, whole) == 0 < Budget(seconds=100).runs_left(took)
    assert Budget(seconds=100).runs_left([2.0], []) == 49
