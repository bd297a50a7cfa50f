"""Intervals widen by what is not known of a stack or a device, and narrow by what is stated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks._step_fit import (
    EVIDENCE_PER_SOURCE,
    EXPERT_COEFFICIENTS,
    between_sd,
    fit,
    fit_with_experts,
    model_error,
    residual_sd,
    source_weights,
)
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.interval import Z80, Levels, log_sd
from paceline.estimate.fit.origin import IMPLEMENTATION_OF, SOFTWARE
from paceline.estimate.fit.posterior import (
    PRIOR,
    predict,
    predict_each,
)
from paceline.estimate.fit.published import read_row
from paceline.estimate.model.case import cases_of
from paceline.estimate.model.coefficients import CENTRE, NAMES
from paceline.estimate.run_case import parse_software
from tests.estimate.fit.test_families import COUNTS, LARGE
from tests.estimate.fit.test_published import ROW


def test_the_width_between_groups_is_that_of_their_means():
    rng = np.random.default_rng(3)
    groups = [name for name in "abcdefghijkl" for _ in range(40)]
    means = {name: 0.1 * rng.normal() for name in sorted(set(groups))}
    missed = np.array([means[name] for name in groups]) + 0.05 * rng.normal(size=len(groups))
    expected = float(np.sqrt(np.mean(np.square(list(means.values())))))
    assert between_sd(missed, groups, np.zeros(len(groups))) == pytest.approx(expected, rel=0.1)
    alike = 0.05 * rng.normal(size=len(groups))
    assert between_sd(alike, groups, np.zeros(len(groups))) < 0.02
    known = np.full(len(groups), expected**2 / 2)
    assert between_sd(missed, groups, known) == pytest.approx(expected / 2**0.5, rel=0.2)
    assert between_sd(missed[:2], groups[:2], known[:2]) == 0


def test_what_formulas_miss_lies_beyond_what_fits_leave_open():
    rng, case = np.random.default_rng(4), read_row(ROW).case
    fused, torch = replace(case, implementation="fused"), replace(case, implementation="torch")
    x, sources = cases_of([fused] * 900 + [torch] * 100), list("abcdefghi") * 100 + ["j"] * 100
    known = np.full(1000, 0.03**2)
    missed = np.hypot(
        0.03, np.where(x.is_category("implementation", "torch"), 0.2, 0.05)
    ) * rng.normal(size=1000)
    residual = residual_sd(x, missed, known, sources)
    assert residual["fused"] == pytest.approx(0.05, rel=0.15)
    assert 0.06 < residual["torch"] < 0.15
    assert 0.05 < residual["softmax"] < residual["torch"]
    assert residual_sd(x, missed, np.ones(1000), sources)["fused"] == 0


def test_what_steps_of_a_source_share_is_no_error_of_single_steps():
    rng, names = np.random.default_rng(5), [name for name in "abcdefghij" for _ in range(80)]
    shared = {name: 0.08 * (-1) ** number for number, name in enumerate("abcdefghij")}
    x = cases_of([replace(read_row(ROW).case, implementation="fused")] * 800)
    missed = np.array([shared[name] for name in names]) + 0.05 * rng.normal(size=800)
    source_sd, residual = model_error(x, missed, np.zeros(800), names)
    assert source_sd == pytest.approx(0.08, rel=0.1)
    assert residual["fused"] < residual_sd(x, missed, np.zeros(800), names)["fused"]
    inside = np.abs(missed) < Z80 * np.hypot(source_sd, residual["fused"])
    assert inside.mean() == pytest.approx(0.8, abs=0.01)


def test_a_stack_or_device_that_was_looked_at_narrows_the_interval():
    between = {"software": 0.09, "device": 0.05}
    evidence, case = (
        shipped_evidence().model_copy(update={"unseen_sd": between}),
        read_row(ROW).case,
    )
    assert min(shipped_evidence().unseen_sd[name] for name in ("software", "source")) > 0.01
    seen = replace(case, software=evidence.software[0], family=evidence.devices[0])
    cases = [seen, replace(seen, software="any"), replace(seen, family="Wonder-9000")]
    sd = log_sd(cases_of(cases), evidence.fit(), evidence.residual_sd, evidence.levels)
    widths = list(between.values())
    assert sd[1:] == pytest.approx(np.hypot(sd[0], widths))
    of_one_machine = log_sd(cases_of(cases), evidence.fit(), evidence.residual_sd)
    assert of_one_machine == pytest.approx(np.full(3, sd[0]))
    everywhere = replace(evidence.levels, source_sd=0.04)
    of_a_source = log_sd(cases_of(cases), evidence.fit(), evidence.residual_sd, everywhere)
    assert of_a_source == pytest.approx(np.hypot(sd, 0.04))
    assert Levels().variance(cases_of(cases)) == pytest.approx(np.zeros(3))


def test_every_software_computes_by_some_stack():
    assert set(SOFTWARE) | {"any"} == set(IMPLEMENTATION_OF)
    assert (
        parse_software("nemo").implementation == "fused" and parse_software("nemo").name == "nemo"
    )
    assert (
        parse_software("softmax").name == "any" and parse_software("any").implementation == "fused"
    )


def test_sources_of_one_stack_share_what_they_count_for():
    weights = source_weights(["a"] * 8 + ["b", "c"], ["nemo"] * 9 + ["hf"])
    assert weights[:8] == pytest.approx(np.full(8, EVIDENCE_PER_SOURCE / 8 / 2**0.5))
    assert weights[8:] == pytest.approx(np.array([1 / 2**0.5, 1]))  # a row counts for one at most


def test_vectors_of_coefficients_are_predicted_together_as_one_by_one():
    x = cases_of([read_row({**ROW, "mbs": str(m)}).case for m in (1, 2, 4)])
    vectors = CENTRE + 0.1 * np.random.default_rng(1).normal(size=(7, len(CENTRE)))
    each = np.array([predict(x, vector) for vector in vectors])
    assert predict_each(x, vectors) == pytest.approx(each, rel=1e-12)


def test_a_generation_seen_makes_an_unseen_one_likelier():
    large = {**ROW, "hidden": "8192", "heads": "64", "step_time_s": "99"}
    rows = [read_row({**large, "mbs": str(m)}) for m in (4, 8, 16)]
    x = cases_of([row.case for row in rows])
    faster = fit(x, predict(x, CENTRE) / 1.2, ["a", "b", "c"], ["nemo", "hf", "megatron"])
    gain = faster.centre - CENTRE
    seen, unseen = (gain[NAMES.index(f"gemm_{name}")] for name in ("ampere", "hopper"))
    assert seen > unseen > 0.02


def test_rows_with_experts_leave_what_dense_models_share():
    dense = [read_row({**ROW, "mbs": str(m), "source": s}).case for m in (4, 8, 16) for s in "ab"]
    experts = [read_row({**LARGE, **COUNTS, "mbs": str(m)}).case for m in (1, 2, 4, 8)]
    x = cases_of(dense + experts)
    measured = predict(x, CENTRE)
    measured[len(dense) :] *= 1.4
    fitted = fit_with_experts(x, measured, ["a", "b"] * 3 + ["c"] * 4, ["nemo"] * 10)
    alone = fit_with_experts(
        x.pick(x.experts <= 1), measured[: len(dense)], ["a", "b"] * 3, ["nemo"] * 6
    )
    of_experts = np.array([name in EXPERT_COEFFICIENTS for name in NAMES])
    assert fitted.centre[~of_experts] == pytest.approx(alone.centre[~of_experts])
    moved = np.abs(fitted.centre - PRIOR.centre)[of_experts]
    assert moved.max() > 0.1
