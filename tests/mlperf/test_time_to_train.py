"""A benchmark's time to train by estimate: samples of the reference, steps of the model."""

from __future__ import annotations

from math import ceil, exp, hypot, log

import pytest

from paceline.core.errors import UserError
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import Estimate, estimate
from paceline.mlperf.score.convergence import reference_at
from paceline.mlperf.time_to_train import UNSURE_EVALUATION, time_to_train

ASKED = EstimateRequest(
    "llama31-8b", "GB300", 72, "mlperf-trial-72", ("training.dtype=nvfp4",), devices_per_node=4
)


@pytest.fixture(scope="module")
def found() -> Estimate:
    return estimate(ASKED, shipped_evidence())


def test_minutes_are_the_references_samples_at_the_models_rate_and_evaluations(found: Estimate):
    spec, reference = ASKED.spec, reference_at("llama31_8b", "5.1.0", 36, 10)
    time = time_to_train(spec, found, "5.1.0")
    assert reference is not None and time.samples == reference.mean
    assert time.reference_batches == (32, 64) and time.samples_stdev > 0
    every = ceil(12_288 / 36) * 36
    assert time.num_evaluations == ceil(reference.mean / every)
    evaluation_s = 1024 / found.samples_per_s / 3
    training_s = reference.mean / found.samples_per_s
    assert time.evaluation_s == pytest.approx(evaluation_s)
    assert time.minutes * 60 == pytest.approx(training_s + time.num_evaluations * evaluation_s)


def test_the_interval_is_that_of_step_samples_and_evaluations_together(found: Estimate):
    time = time_to_train(ASKED.spec, found, "5.1.0")
    evaluating = time.num_evaluations * time.evaluation_s / 60 / time.minutes
    step = log(found.high_s / found.low_s) / 2
    expected = hypot(
        step,
        1.2816 * time.samples_stdev / time.samples,
        1.2816 * UNSURE_EVALUATION * evaluating,
    )
    assert time.high_minutes / time.minutes == pytest.approx(exp(expected))
    assert time.minutes / time.low_minutes == pytest.approx(exp(expected))
    assert expected > step and "unofficial" in time.label


def test_what_has_no_reference_is_refused(found: Estimate):
    spec = ASKED.spec
    training = spec.training.model_copy(update={"global_batch": 4096})
    for other, ruleset, message in (
        (spec.model_copy(update={"mlperf": None}), "5.1.0", "does not train an MLPerf benchmark"),
        (spec, "1.0.0", "has no llama31_8b"),
        (spec.model_copy(update={"training": training}), "5.1.0", "is larger than all reference"),
    ):
        with pytest.raises(UserError, match=message):
            time_to_train(other, found, ruleset)
