"""Step times of one machine move the coefficients that they depend on, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.interval import log_sd
from paceline.estimate.fit.refit import (
    cpu_prior,
    inseparable_coefficients,
    prior_of,
    refit,
    undetermined_coefficients,
)
from paceline.estimate.model.coefficients import NAMES, coefficient_values
from paceline.estimate.model.step import step_time
from tests.estimate.machines import CPU, H100, layouts

KNOWN = coefficient_values(shipped_evidence().fit().centre)


def times_with(**factors: float) -> np.ndarray:
    """The layouts' times on a machine whose coefficients differ by these factors."""
    truth = {name: value * factors.get(name, 1.0) for name, value in KNOWN.items()}
    return step_time(layouts(H100), truth).total


def test_a_slower_machine_is_predicted_after_a_few_steps():
    slow = times_with(gemm_hopper=0.8)
    before = step_time(layouts(H100), KNOWN).total
    after = refit(shipped_evidence(), layouts(H100), slow, "a slow machine")
    now = step_time(layouts(H100), after.medians).total
    assert np.median(np.abs(before / slow - 1)) > 0.1
    assert np.max(np.abs(now / slow - 1)) < 0.05
    assert after.medians["gemm_hopper"] < 0.95 * shipped_evidence().medians["gemm_hopper"]


def test_what_is_known_already_stays_where_it_was():
    after = refit(shipped_evidence(), layouts(H100), times_with(), "as expected")
    for name, value in KNOWN.items():
        assert after.medians[name] == pytest.approx(value, rel=0.02), name


def test_steps_make_the_interval_narrower():
    x = layouts(H100)
    after = refit(shipped_evidence(), x, times_with(), "as expected")
    before_sd = log_sd(x, shipped_evidence().fit(), shipped_evidence().residual_sd)
    assert np.all(log_sd(x, after.fit(), after.residual_sd) < before_sd)


def test_a_machine_that_the_formulas_do_not_fit_widens_it():
    wild = times_with() * np.exp(np.array([0.4, -0.4, 0.5, -0.5, 0.4, -0.4, 0.5, -0.5]))
    after = refit(shipped_evidence(), layouts(H100), wild, "wild")
    assert after.residual_sd["fused"] > 1.5 * shipped_evidence().residual_sd["fused"]
    assert after.residual_sd["softmax"] == pytest.approx(
        shipped_evidence().residual_sd["softmax"], rel=1e-3
    )


def test_rows_without_a_time_do_not_count():
    some = times_with(gemm_hopper=0.8)
    some[[1, 3]] = [np.nan, 0.0]
    after = refit(shipped_evidence(), layouts(H100), some, "two failed")
    assert after.rows == shipped_evidence().rows + 6 and after.own_rows == 6
    assert after.provenance == "stored profile"
    nothing = refit(shipped_evidence(), layouts(H100), np.full(8, np.nan), "all failed")
    assert nothing.medians == shipped_evidence().medians and nothing.title == "all failed"


def test_a_noisy_row_moves_less_than_a_good_one():
    slow = times_with(gemm_hopper=0.8)
    good = refit(shipped_evidence(), layouts(H100), slow, "good", 0.05)
    noisy = refit(shipped_evidence(), layouts(H100), slow, "noisy", np.full(8, 1.0))
    assert (
        good.medians["gemm_hopper"]
        < noisy.medians["gemm_hopper"]
        < shipped_evidence().medians["gemm_hopper"]
    )


def test_one_machine_is_less_known_than_all_until_it_has_steps_of_its_own():
    at = NAMES.index("gemm_hopper")
    assert (
        prior_of(shipped_evidence()).covariance[at, at]
        > shipped_evidence().fit().covariance[at, at]
    )
    own = refit(shipped_evidence(), layouts(H100), times_with(), "own")
    assert np.array_equal(prior_of(own).covariance, own.fit().covariance)


def test_what_the_steps_say_nothing_about_is_named():
    after = refit(shipped_evidence(), layouts(H100), times_with(), "as expected")
    left = undetermined_coefficients(shipped_evidence(), after)
    assert {"gemm_volta", "host_softmax_s", "gemm_8bit"} <= set(left)
    assert "gemm_hopper" not in left


def test_what_only_acts_together_is_named():
    """A CPU's products go by one rate, of which two coefficients are factors."""
    open_ones, prior = ("gemm_cpu", "gemm_torch"), cpu_prior("fp32")
    variances = {name: {name: 0.09 if name in open_ones else 1e-5} for name in NAMES}
    before = prior.model_copy(update={"covariance": variances, "own_rows": 1})
    x = layouts(CPU)
    after = refit(before, x, step_time(x, prior.medians).total, "rates", 0.02)
    assert inseparable_coefficients(before, after) == [open_ones]
    assert inseparable_coefficients(before, before) == []
