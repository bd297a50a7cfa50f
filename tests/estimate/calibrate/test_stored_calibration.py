"""What a calibration measured is weighed to the same coefficients after a way through a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks._stored_calibration import from_json, short_from_json, to_json
from paceline.estimate.calibrate.measurement import Measurements, fit_calibration
from tests.estimate.calibrate.micro import ABOUT, rates, timed


@pytest.fixture
def measured(tmp_path: Path) -> Measurements:
    return Measurements(ABOUT, [rates(1), rates(2)], timed(tmp_path)[::4])


def test_measurements_come_back_whole(measured: Measurements):
    again = from_json(json.loads(json.dumps(to_json(measured))))
    assert again.about == measured.about and again.trainings == measured.trainings
    assert [each.placement for each in again.rates] == [each.placement for each in measured.rates]
    assert [each.lines for each in again.rates] == [each.lines for each in measured.rates]


def test_they_are_weighed_to_the_same_coefficients(measured: Measurements):
    again = from_json(json.loads(json.dumps(to_json(measured))))
    both = [fit_calibration(each.about, each.rates, each.trainings) for each in (measured, again)]
    assert both[0] == both[1]


def test_something_else_is_refused():
    with pytest.raises(ValueError):
        short_from_json({"recipe": "micro", "spec": {"recipe": "micro"}})
