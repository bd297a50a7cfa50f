"""Intervals widen by what is not known of a stack or a device, and narrow by what is stated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.estimate.fit.evidence import shipped
from paceline.estimate.fit.interval import Levels, between_sd, log_sd
from paceline.estimate.fit.origin import SOFTWARE, STACK_OF
from paceline.estimate.fit.posterior import PRIOR, fit_with_experts, predict
from paceline.estimate.fit.published import read_row
from paceline.estimate.model.case import cases_of
from paceline.estimate.model.coefficients import CENTRE, NAMES, OF_EXPERTS
from paceline.estimate.run_case import software_named
from tests.estimate.fit.test_families import COUNTS, LARGE
from tests.estimate.fit.test_published import ROW


def test_the_width_between_groups_is_that_of_their_means():
    rng = np.random.default_rng(3)
    groups = [name for name in "abcdefghijkl" for _ in range(40)]
    means = {name: 0.1 * rng.normal() for name in sorted(set(groups))}
    missed = np.array([means[name] for name in groups]) + 0.05 * rng.normal(size=len(groups))
    expected = float(np.sqrt(np.mean(np.square(list(means.values())))))
    assert between_sd(missed, groups) == pytest.approx(expected, rel=0.1)
    assert between_sd(0.05 * rng.normal(size=len(groups)), groups) < 0.02
    assert between_sd(missed[:2], groups[:2]) == 0


def test_a_stack_or_device_that_was_looked_at_narrows_the_interval():
    evidence, case = shipped(), read_row(ROW).case
    seen = replace(case, software=evidence.stacks[0], family=evidence.devices[0])
    cases = [seen, replace(seen, software="any"), replace(seen, family="Wonder-9000")]
    sd = log_sd(cases_of(cases), evidence.fit(), evidence.residual_sd, evidence.levels)
    widths = [evidence.between["stack"], evidence.between["device"]]
    assert all(width > 0.03 for width in widths)
    assert sd[1:] == pytest.approx(np.hypot(sd[0], widths))
    of_one_machine = log_sd(cases_of(cases), evidence.fit(), evidence.residual_sd)
    assert of_one_machine == pytest.approx(np.full(3, sd[0]))
    assert Levels().variance(cases_of(cases)) == pytest.approx(np.zeros(3))


def test_every_software_computes_by_some_stack():
    assert set(SOFTWARE) | {"any"} == set(STACK_OF)
    assert software_named("nemo").stack == "fused" and software_named("nemo").name == "nemo"
    assert software_named("softmax").name == "any" and software_named("any").stack == "fused"


def test_rows_with_experts_leave_what_dense_models_share():
    dense = [read_row({**ROW, "mbs": str(m), "source": s}).case for m in (4, 8, 16) for s in "ab"]
    experts = [read_row({**LARGE, **COUNTS, "mbs": str(m)}).case for m in (1, 2, 4, 8)]
    x = cases_of(dense + experts)
    measured = predict(x, CENTRE)
    measured[len(dense) :] *= 1.4
    fitted = fit_with_experts(x, measured, ["a", "b"] * 3 + ["c"] * 4)
    alone = fit_with_experts(x.pick(x.experts <= 1), measured[: len(dense)], ["a", "b"] * 3)
    of_experts = np.array([name in OF_EXPERTS for name in NAMES])
    assert fitted.centre[~of_experts] == pytest.approx(alone.centre[~of_experts])
    moved = np.abs(fitted.centre - PRIOR.centre)[of_experts]
    assert moved.max() > 0.1
