"""Steps that estimates are adjusted to: published rows, tables and runs."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.estimate.calibrate.lookup import FileEvidence
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.posterior import predict
from paceline.estimate.model.case import cases_of
from paceline.estimate.similar_steps import published_steps
from paceline.files.references import find_rows


@pytest.mark.parametrize(
    ("source", "max_error"),
    [
        ("bigscience-1b3", 0.11),
        ("lambda-1cc", 0.05),
        ("nvidia-dgxc", 0.06),
        ("nvidia-llama31", 0.05),
        ("megatron-bridge", 0.12),
        ("vtrain", 0.12),
    ],
)
def test_shipped_references_are_read_as_the_runs_that_they_were(source: str, max_error: float):
    steps = published_steps(source, find_rows(source))
    x, measured_s = cases_of([case for case, _ in steps]), np.array([s for _, s in steps])
    error = np.abs(predict(x, shipped_evidence().fit().centre) / measured_s - 1)
    assert error.mean() < max_error


def test_rows_with_experts_have_the_release_of_their_table():
    steps = published_steps("megatron-bridge-2602", find_rows("megatron-bridge-2602"))
    experts = [case for case, _ in steps if case.experts > 1]
    assert experts and {round(case.software_date, 2) for case, _ in steps} == {2026.08}
    assert {case.experts for case in experts} == {128}


def test_steps_of_gpus_do_not_adjust_an_estimate_of_a_cpu():
    with pytest.raises(UserError, match="adjusts estimates of GPUs"):
        FileEvidence(None, shipped_evidence()).of("cpu", "fp32")


def test_rows_without_a_step_time_are_refused_with_the_reason():
    with pytest.raises(UserError, match="no row that can be modelled: it states no step time"):
        published_steps("mlperf-rcp", find_rows("mlperf-rcp"))
