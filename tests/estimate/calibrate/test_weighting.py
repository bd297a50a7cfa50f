"""A calibration meets its own steps, and says what it could not tell."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.estimate.calibrate.calibration import Calibration
from paceline.estimate.calibrate.measurement import fit_calibration, machine_here
from tests.estimate.calibrate.micro import ABOUT, rates, timed


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """A machine half as slow again as processors in general."""
    folder = tmp_path_factory.mktemp("weighed")
    return fit_calibration(ABOUT, [rates(1), rates(2)], timed(folder, 1.5))


def test_steps_of_a_slow_machine_are_met(calibrated: Calibration):
    errors = [abs(step.predicted_s / step.measured_s - 1) for step in calibrated.steps]
    assert np.median(errors) < 0.1
    assert calibrated.evidence.own_rows == len(calibrated.steps) and calibrated.probes == 11
    assert calibrated.evidence.residual_sd["torch"] < 0.2


def test_what_was_left_open_is_of_this_device(calibrated: Calibration):
    assert not {"gemm_volta", "host_softmax_s", "gemm_8bit", "host_volta"} & set(
        calibrated.undetermined_coefficients
    )
    assert "host_torch_s" not in calibrated.undetermined_coefficients
    assert "Some CPU, fp32, 2026-01-02" in calibrated.evidence.title


def test_rates_are_those_of_as_many_processes(calibrated: Calibration):
    assert machine_here(calibrated, 1).peak_wide("fp32") == 1e11
    assert machine_here(calibrated, 2).peak_wide("fp32") == 5e10
    assert machine_here(calibrated, 2).intra_bytes_per_s == 1.7e9
