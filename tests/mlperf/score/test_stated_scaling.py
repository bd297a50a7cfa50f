"""A factor that a submission states and the test does not ask for is mentioned."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.mlperf.score.run_set import score
from paceline.mlperf.score.stated_scaling import stated_scaling
from tests.mlperf.samples import TEN, submission


def test_another_factor_is_told_with_what_it_would_make(tmp_path: Path):
    folder = submission(tmp_path, TEN)
    (folder / "scaling.json").write_text('{"scaling_factor": 1.05}')
    scored = score(folder)
    assert scored.score_minutes == pytest.approx(10.1875)
    assert (
        "scaling.json states the factor 1.050000, the convergence test asks for 1.000000, which "
        "is used: with the file's the score would be 10.6969 minutes"
    ) in scored.warnings


def test_the_factor_of_the_test_is_not_mentioned(tmp_path: Path):
    (tmp_path / "scaling.json").write_text('{"scaling_factor": 1.0092330000001}')
    assert stated_scaling(tmp_path, 1.009233, 14.0) is None
    assert stated_scaling(tmp_path, None, None) is None
    assert stated_scaling(tmp_path / "nowhere", 1.0, 14.0) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"scaling_factor": null}', "[" * 100_000])
def test_a_file_that_states_none_is_told(tmp_path: Path, text: str):
    (tmp_path / "scaling.json").write_text(text)
    assert "that can be read" in str(stated_scaling(tmp_path, 1.0, 14.0))


@pytest.mark.parametrize("value", ["-1", "0", "Infinity", "NaN"])
def test_what_is_no_factor_is_told(tmp_path: Path, value: str):
    (tmp_path / "scaling.json").write_text(f'{{"scaling_factor": {value}}}')
    assert "which is no factor" in str(stated_scaling(tmp_path, 1.0, 14.0))
