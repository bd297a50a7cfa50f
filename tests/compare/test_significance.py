"""The test behind a verdict, compared with scipy's and with its error rates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from paceline.compare.significance import (
    MAX_FURTHER_REPEATS,
    RatioEstimate,
    chance_of_decision,
    compare_repeats,
    compare_with_figure,
    correct_p_values,
    decide,
    decide_by_margin,
    further_repeats,
    power,
)

BEFORE, AFTER = [0.2301, 0.2310, 0.2295], [0.2352, 0.2371, 0.2349, 0.2360]


def test_the_interval_and_p_are_those_of_welchs_test_on_logarithms():
    estimated = compare_repeats(BEFORE, AFTER)
    reference: Any = stats.ttest_ind(np.log(AFTER), np.log(BEFORE), equal_var=False)
    interval = reference.confidence_interval(0.95)
    assert estimated.degrees == pytest.approx(reference.df)
    assert estimated.p_value() == pytest.approx(reference.pvalue)
    assert estimated.interval() == pytest.approx((np.exp(interval.low), np.exp(interval.high)))
    assert estimated.ratio == pytest.approx(stats.gmean(AFTER) / stats.gmean(BEFORE))


def test_against_a_fixed_figure_it_is_the_one_sample_test():
    estimated = compare_with_figure(0.231, AFTER)
    reference: Any = stats.ttest_1samp(np.log(np.array(AFTER) / 0.231), 0.0)
    interval = reference.confidence_interval(0.95)
    assert estimated.p_value() == pytest.approx(reference.pvalue)
    assert estimated.interval() == pytest.approx((np.exp(interval.low), np.exp(interval.high)))


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20))
def test_the_correction_is_benjamini_and_hochbergs(p_values: list[float]):
    assert correct_p_values(p_values) == pytest.approx(
        list(stats.false_discovery_control(p_values))
    )


def test_no_p_values_need_no_correction():
    assert correct_p_values([]) == []


def estimate(change: float, deviation: float, n: int = 5) -> RatioEstimate:
    """n repeats a side, of which each has this relative deviation."""
    return RatioEstimate(
        float(np.log1p(change)), deviation * (2 / n) ** 0.5, 2.0 * (n - 1), (deviation**2,) * 2
    )


@pytest.mark.parametrize(
    ("change", "deviation", "answer"),
    [
        (0.02, 0.004, "higher"),
        (-0.02, 0.004, "lower"),
        (0.0, 0.004, "same"),
        (0.003, 0.001, "same"),  # surely not equal, but the difference does not matter
        (0.02, 0.02, "undecided"),  # beyond the margin, but perhaps by chance
        (0.009, 0.004, "undecided"),  # inside the margin, but perhaps not truly
        (0.0, 0.02, "undecided"),  # no difference seen is not the same as no difference
        (0.0105, 0.0001, "higher"),
        (0.0095, 0.0001, "same"),
    ],
)
def test_an_answer_needs_margin_and_certainty(change: float, deviation: float, answer: str):
    assert decide(estimate(change, deviation), 0.01) == answer


def test_printed_digits_widen_the_margin():
    slower = estimate(0.02, 0.002)
    assert decide(slower, 0.01) == "higher"
    assert decide(slower, 0.01, resolution=0.017) == "same"
    assert slower.p_value() < 0.001 and slower.p_value(0.02) == 1.0


@given(
    st.lists(st.floats(0.1, 0.2), min_size=3, max_size=6),
    st.lists(st.floats(0.1, 0.2), min_size=3, max_size=6),
    st.floats(0.001, 0.2),
)
def test_exchanging_the_sides_exchanges_the_answer(a: list[float], b: list[float], margin: float):
    forward, backward = compare_repeats(a, b), compare_repeats(b, a)
    if forward.identical:
        return
    mirrored = {"higher": "lower", "lower": "higher"}
    answer = decide(forward, margin)
    assert decide(backward, margin) == mirrored.get(answer, answer)
    assert backward.ratio == pytest.approx(1 / forward.ratio)


@given(st.floats(-0.05, 0.05), st.floats(1e-4, 0.05), st.integers(3, 10), st.floats(0, 0.05))
def test_a_wider_margin_never_makes_a_difference_of_what_was_none(
    change: float, deviation: float, n: int, margin: float
):
    estimated = estimate(change, deviation, n)
    if decide(estimated, margin) == "same":
        assert decide(estimated, margin + 0.01) == "same"
    if decide(estimated, margin + 0.01) == "higher":
        assert decide(estimated, margin) == "higher"


def test_one_side_without_spread_is_tested_with_the_others():
    estimated = compare_repeats([0.2, 0.2, 0.2], AFTER)
    assert not estimated.identical and estimated.degrees == pytest.approx(len(AFTER) - 1)


def test_identical_values_are_no_test():
    estimated = compare_repeats([0.2] * 3, [0.21] * 4)
    assert estimated.identical and estimated.interval() == pytest.approx((1.05, 1.05))
    assert estimated.p_value() == 0.0 and compare_repeats([0.2] * 3, [0.2] * 3).p_value() == 1.0


def test_values_of_any_size_give_finite_ratios():
    estimated = compare_repeats([1e-300, 2e-300, 3e-300], [1e300, 2e300, 3e300])
    assert np.isfinite([estimated.ratio, *estimated.interval()]).all()


@pytest.mark.parametrize(
    ("change", "known_error", "answer"),
    [
        (0.02, 0.0, "higher"),
        (-0.02, 0.0, "lower"),
        (0.005, 0.0, "same"),
        (0.02, 0.004, "higher"),
        (0.02, 0.012, "undecided"),
        (0.005, 0.009, "same"),
        (0.005, 0.02, "undecided"),
    ],
)
def test_single_runs_are_judged_by_the_margin_unless_their_own_noise_hides_it(
    change: float, known_error: float, answer: str
):
    assert decide_by_margin(float(np.log1p(change)), known_error, 0.01) == answer


def test_further_repeats_are_as_many_as_decide_in_four_of_five_cases():
    estimated = estimate(0.0, 0.006, n=3)
    more = further_repeats(estimated, 3, 3, 0.01)
    assert more is not None
    assert chance_of_decision(estimated, 3 + more, 0.01) >= 0.8
    assert chance_of_decision(estimated, 2 + more, 0.01) < 0.8


def test_the_planned_chance_of_a_decision_is_the_true_one():
    estimated, n, rng = estimate(0.004, 0.006), 8, np.random.default_rng(3)
    runs = np.exp(rng.normal(0, 0.006, (4000, 2, n))) * [[1.0], [estimated.ratio]]
    answers = [decide(compare_repeats(before, after), 0.01) for before, after in runs]
    decided = sum(answer != "undecided" for answer in answers) / len(answers)
    assert decided == pytest.approx(chance_of_decision(estimated, n, 0.01), abs=0.02)


@pytest.mark.parametrize("resolution", [0.0, 0.003])
@pytest.mark.parametrize(("sides", "n"), [(1, 3), (1, 5), (2, 3), (2, 5)])
def test_the_power_is_how_often_a_difference_is_found(sides: int, n: int, resolution: float):
    rng = np.random.default_rng(5)
    runs = np.exp(rng.normal(0, 0.01, (3000, 2, n))) * [[1.0], [1.02]]
    estimates = (
        compare_repeats(before, after) if sides == 2 else compare_with_figure(1.0, after)
        for before, after in runs
    )
    answers = [decide(estimated, 0.01, resolution) for estimated in estimates]
    share = answers.count("higher") / len(answers)
    assert power([0.01**2] * sides, n, 0.02, 0.01, resolution) == pytest.approx(share, abs=0.03)


def test_against_a_figure_as_printed_more_repeats_are_planned():
    exact, printed = (
        further_repeats(compare_with_figure(1.0, [1.01, 1.02, 1.03]), 3, 3, 0.01, resolution)
        for resolution in (0.0, 0.005)
    )
    assert exact is not None and printed is not None and printed > exact


def test_a_difference_at_the_margin_cannot_be_planned_for():
    assert further_repeats(estimate(0.01, 0.006, n=3), 3, 3, 0.01) is None
    assert MAX_FURTHER_REPEATS >= 20


def test_unequal_sides_are_filled_up_to_the_larger_one():
    estimated = estimate(0.0, 0.006, n=3)
    assert (further_repeats(estimated, 3, 12, 0.01) or 0) >= 10
