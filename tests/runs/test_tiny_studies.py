"""Each published benchmark is repeated at its tiny size, from nothing to a result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.files.studies import study_names
from tests.command import paceline

ROWS = {"bigscience": 6, "lambda": 2, "mlperf": 1, "nvidia": 1}
"""Number of configurations of each tiny study."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "nvidia" else pytest.mark.nightly)
        for name in study_names()
    ],
)
def test_a_tiny_study_stages_launches_and_shows_the_published_figures(name: str, tmp_path: Path):
    environment = {"PACELINE_STAGE": str(tmp_path / "stage")}
    words = ("reproduce", name, "--tiny", "--json")
    done = paceline(*words, runs=tmp_path / "runs", env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["complete"] and len(told["figures"]) == ROWS[name]
    for figure in told["figures"]:
        assert figure["measured"] > 0 and figure["published"] > 0 and figure["reference"]
        assert figure["ratio"] is None

    again = paceline(*words, runs=tmp_path / "runs", env=environment)
    assert again.returncode == 0 and again.stdout == done.stdout
    assert "[1]" not in again.stderr  # Nothing is started again.
