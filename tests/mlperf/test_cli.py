"""`paceline mlperf` as a user meets it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import command
from tests.mlperf.samples import TEN, submission, trial

LABEL = "unofficial, not verified by MLCommons Association"


def paceline(*words: object) -> subprocess.CompletedProcess[str]:
    return command.paceline("mlperf", *words)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return submission(tmp_path / "runs", TEN)


def test_exit_codes_tell_a_score_a_refusal_and_a_gap_apart(runs: Path):
    (runs / "result_0.txt").write_text(trial(0, minutes=None))
    assert paceline("score", runs).returncode == 0

    (runs / "result_1.txt").write_text(trial(1, minutes=None))
    refused = paceline("score", runs)
    assert refused.returncode == 3 and "no score, invalid" in refused.stdout
    assert "2 of 10 runs did not converge" in refused.stdout

    (runs / "result_2.txt").unlink()
    gap = paceline("score", runs, "--json")
    assert gap.returncode == 4 and json.loads(gap.stdout)["score_minutes"] is None


def test_bad_input_is_one_line_and_exit_code_1(runs: Path, tmp_path: Path):
    (runs / "result_2.txt").write_text(trial(2, benchmark="flux1"))
    for words in (
        ("score", runs),
        ("score", tmp_path / "no"),
        ("score", runs, "--ruleset", "x"),
        ("check", tmp_path / "no"),
        ("check", runs, "--ruleset", "x"),
    ):
        done = paceline(*words)
        assert (done.returncode, done.stdout) == (1, ""), words
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
