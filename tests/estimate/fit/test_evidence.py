"""Coefficients of a file that was written before there were as many as today."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.estimate.fit.evidence import Evidence, shipped_evidence
from paceline.estimate.fit.posterior import GEMM_GENERATIONS, PRIOR
from paceline.estimate.model.coefficients import NAMES, coefficient_values

OF_PRODUCTS = [f"gemm_{name}" for name in GEMM_GENERATIONS]


def without(*names: str) -> Evidence:
    known = shipped_evidence()
    medians = {name: value for name, value in known.medians.items() if name not in names}
    return known.model_copy(update={"medians": medians})


def test_a_coefficient_that_a_file_lacks_keeps_its_prior():
    kept = coefficient_values(without("optimizer").fit().centre)["optimizer"]
    assert kept == pytest.approx(coefficient_values(PRIOR.centre)["optimizer"])


def test_but_follows_those_that_it_shares_a_prior_with():
    missing, *others = OF_PRODUCTS
    prior = dict(coefficient_values(PRIOR.centre))
    medians = prior | {name: 1.2 * prior[name] for name in others}
    del medians[missing]
    file = shipped_evidence().model_copy(update={"medians": medians})
    i = NAMES.index(missing)
    assert PRIOR.centre[i] < file.fit().centre[i] < PRIOR.centre[i] + np.log(1.2)
