"""What a calibration measured is weighed to the same coefficients after a way through a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.estimate.calibrate.programs import Measured
from paceline.estimate.calibrate.stored import from_json, short_from_json, to_json
from paceline.estimate.calibrate.weighting import weighed
from tests.estimate.calibrate.micro import ABOUT, rates, timed


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    return Measured(ABOUT, [rates(1), rates(2)], timed(tmp_path)[::4])


def test_measurements_come_back_whole(measured: Measured):
    kept = json.loads(json.dumps(to_json(measured)))
    again = from_json(kept)
    assert again.about == measured.about and again.timed == measured.timed
    assert [one.placement for one in again.rates] == [one.placement for one in measured.rates]
    assert [one.lines for one in again.rates] == [one.lines for one in measured.rates]


def test_they_are_weighed_to_the_same_coefficients(measured: Measured):
    again = from_json(json.loads(json.dumps(to_json(measured))))
    both = [weighed(one.about, one.rates, one.timed) for one in (measured, again)]
    assert both[0] == both[1]


def test_something_else_is_refused():
    with pytest.raises(ValueError):
        short_from_json({"recipe": "micro", "spec": {"recipe": "micro"}})
