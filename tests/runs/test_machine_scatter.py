"""Single and unmixed runs are judged by what kept runs of their configuration say."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.runs.bundles.writing import BUNDLE_FILE
from paceline.runs.comparison import ComparisonOptions, compare_runs
from tests.runs.series_example import around, make_finished, make_many


def test_a_history_lets_single_runs_be_judged_and_none_does_not(tmp_path: Path):
    before = make_finished(tmp_path, 20, 0.2)
    after = make_finished(tmp_path, 21, 0.21)
    alone = compare_runs(tmp_path, before.name, after.name, ComparisonOptions())
    assert (alone.verdict, alone.repeats_needed, alone.confidence) == ("undecided", 2, "low")
    assert "published pairs" in alone.evidence

    make_many(tmp_path, around(0.2, 10, seed=1))
    judged = compare_runs(tmp_path, before.name, after.name, ComparisonOptions())
    assert judged.verdict == "slower" and all("short runs" in why for why in judged.why_low)
    assert judged.low is not None and judged.low > 1
    assert any("11 runs of 11 days" in note for note in judged.notes)


def test_the_candidates_own_runs_do_not_tell_their_scatter(tmp_path: Path):
    make_many(tmp_path, around(0.2, 10, seed=1))
    before, after = tmp_path.glob("*-example-0"), tmp_path.glob("*-example-9")
    judged = compare_runs(tmp_path, next(before).name, next(after).name, ComparisonOptions())
    assert any("9 runs of 9 days" in note for note in judged.notes)


def test_a_candidate_named_by_its_path_does_not_tell_its_own_scatter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_many(tmp_path / "runs", around(0.2, 10, seed=1))
    before, after = (next(tmp_path.glob(f"runs/*-example-{at}")).name for at in (0, 9))
    monkeypatch.chdir(tmp_path)
    judged = compare_runs(Path("runs"), f"runs/{before}", f"runs/{after}", ComparisonOptions())
    assert any("9 runs of 9 days" in note for note in judged.notes)


def test_imported_bundles_tell_of_another_machine(tmp_path: Path):
    make_many(tmp_path, around(0.2, 10, seed=1))
    imported = next(tmp_path.glob("*-example-4"))
    (imported / BUNDLE_FILE).write_text("{}")
    before, after = (next(tmp_path.glob(f"*-example-{at}")).name for at in (0, 9))
    judged = compare_runs(tmp_path, before, after, ComparisonOptions())
    assert any("8 runs of 8 days" in note for note in judged.notes)
