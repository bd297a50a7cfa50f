"""The next move: what is worth a try, when to measure again, when to stop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.layouts.search.decision import (
    MAX_RUNS_PER_LAYOUT,
    SearchState,
    decide,
    expected_improvement,
    fastest_row,
    promising_rows,
    rows_close_to,
    rows_to_repeat,
)
from paceline.layouts.search.residuals import Posterior


def state(seconds: list[float], sd: float | list[float], **more: Any) -> SearchState:
    """Beliefs about as many layouts; `measured` are open no more."""
    size = len(seconds)
    measured: dict[int, list[float]] = more.pop("measured", {})
    usual: dict[str, Any] = {
        "belief": Posterior(np.log(seconds), np.broadcast_to(np.array(sd), size), 0.01),
        "measured": measured,
        "open": np.array([row not in measured for row in range(size)]),
        "p_oom": np.zeros(size),
        "runs": {row: len(runs) for row, runs in measured.items()},
        "runs_left": 10,
    }
    return SearchState(**{**usual, **more})


def test_before_any_figure_the_fastest_expected_is_tried():
    move = decide(state([2.0, 1.0, 3.0], 0.5))
    assert (move.row, move.why) == (1, "try")


def test_the_fastest_that_will_hardly_fit_is_not_the_first():
    move = decide(state([2.0, 1.0, 3.0], 0.5, p_oom=np.array([0.1, 0.9, 0.0])))
    assert move.row == 0


def test_a_layout_in_doubt_is_tried_although_it_is_expected_to_be_slower():
    move = decide(state([1.0, 1.02, 1.1], [0.001, 0.005, 0.3], measured={0: [1.0]}))
    assert (move.row, move.why) == (2, "try")


def test_odds_of_running_out_of_memory_lower_the_interest():
    odds = np.array([0.0, 0.9, 0.0])
    assert decide(state([1.0, 0.9, 0.91], 0.05, measured={0: [1.0]}, p_oom=odds)).row == 2


def test_it_stops_when_no_optimistic_bound_beats_the_best():
    move = decide(state([1.0, 1.2, 1.3], 0.05, measured={0: [1.0]}))
    assert (move.row, move.why) == (None, "bound")
    assert promising_rows(state([1.0, 1.4, 1.6], 0.2, measured={0: [1.0]})).tolist() == [
        False,
        True,
        False,
    ]


def test_it_stops_when_the_budget_is_spent_or_everything_was_tried():
    assert decide(state([1.0, 0.5], 0.5, measured={0: [1.0]}, runs_left=0)).why == "budget"
    assert decide(state([1.0], 0.5, measured={0: [1.0]})).why == "exhausted"


def test_a_spent_budget_is_no_reason_where_nothing_was_left_to_do():
    done = state([1.0, 1.2], 0.05, measured={0: [1.0]}, runs_left=0)
    assert decide(done).why == "bound"
    close = {0: [1.0], 1: [1.001]}
    assert decide(state([1.0, 1.0, 2.0], 0.01, measured=close, runs_left=0)).why == "budget"


def test_layouts_that_are_close_are_measured_again_in_turn():
    measured = {0: [1.0], 1: [1.005], 2: [1.3]}
    assert rows_to_repeat(measured, {0: 1, 1: 1, 2: 1}, 0.01) == [0, 1]
    assert rows_to_repeat(measured, {0: 2, 1: 1, 2: 1}, 0.01) == [1, 0]
    assert (
        rows_to_repeat(measured, {0: MAX_RUNS_PER_LAYOUT, 1: MAX_RUNS_PER_LAYOUT, 2: 1}, 0.01) == []
    )
    assert rows_to_repeat({0: [1.0], 2: [1.3]}, {0: 1, 2: 1}, 0.01) == []
    assert rows_to_repeat({}, {}, 0.01) == []


def test_a_fifth_of_the_runs_is_kept_for_that():
    close = {0: [1.0], 1: [1.001]}
    early = decide(state([1.0, 1.0, 0.9], 0.3, measured=close, runs_left=10))
    late = decide(state([1.0, 1.0, 0.9], 0.3, measured=close, runs_left=2, runs={0: 1, 1: 9}))
    assert early.why == "try" and (late.why, late.row) == ("again", 0)
    apart = decide(state([1.0, 1.5, 0.9], 0.3, measured={0: [1.0], 1: [1.5]}, runs_left=1))
    assert apart.why == "try"


def test_the_best_is_the_one_with_the_smallest_median():
    assert fastest_row({3: [1.0, 5.0, 1.2], 4: [1.1], 5: [2.0]}) == 4 and fastest_row({}) is None
    assert rows_close_to(4, {4: [1.1], 3: [1.11], 5: [2.0]}, 0.01) == [3]


def test_expected_improvement_against_draws():
    random = np.random.default_rng(0)
    for mean, sd in ((0.1, 0.2), (-0.3, 0.1), (0.5, 0.05)):
        drawn = np.maximum(0.0, 0.0 - random.normal(mean, sd, 200_000)).mean()
        (improvement,) = expected_improvement(np.array([mean]), np.array([sd]), 0.0)
        assert improvement == pytest.approx(drawn, abs=1e-3)
