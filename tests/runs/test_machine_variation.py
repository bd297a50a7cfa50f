"""Variation of a machine by its own runs, stored by `probe calibrate` and used by `compare`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.compare.machine_variation import ConfigurationRuns, estimate_prior
from paceline.compare.significance import VariationPrior
from paceline.core.run import RunSpec
from paceline.runs.comparison import ComparisonOptions, compare_runs
from paceline.runs.machine_variation import estimate_machines, variation_file
from tests.example import make_spec
from tests.runs.series_example import make_finished

CPU = "Epyc 9654"
PUBLISHED = VariationPrior(within=0.015, degrees=4, between=0.01, between_degrees=5)


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def spec_on(cpu: str, batch: int = 4) -> RunSpec:
    spec = make_spec(ranks=1)
    return spec.model_copy(
        update={
            "cluster": spec.cluster.model_copy(update={"device_label": cpu}),
            "training": spec.training.model_copy(update={"global_batch": batch}),
        }
    )


def calibrate(root: Path) -> str:
    done = CliRunner().invoke(
        app, ["probe", "calibrate", "--no-probes", "--runs-dir", str(root)], catch_exceptions=False
    )
    assert done.exit_code == 0
    return done.output


def make_history(root: Path, spread: float) -> None:
    """Eight configurations with four runs each: two a day on two days."""
    rng = np.random.default_rng(3)
    for at in range(8):
        spec = spec_on(CPU, 8 * (at + 1))
        for run in range(4):
            time = 0.2 * (at + 1) * float(np.exp(rng.normal(0, spread)))
            make_finished(root, 10 * at + run, time, spec=spec, day=run // 2 + run % 2 / 24)


def test_the_prior_follows_from_the_runs_and_the_published_one():
    runs = ConfigurationRuns(((1.01, 1 / 1.01), (1.0, 1.0)), num_levels=1)
    prior = estimate_prior([runs] * 5, PUBLISHED)
    # Ten degrees within days; squares 5 * 2 * log(1.01)^2.
    within = (4 * 0.015**2 + 10 * np.log(1.01) ** 2) / 14
    assert prior is not None and prior.within == pytest.approx(within**0.5)
    assert prior.between == pytest.approx((5 * 0.01**2 / 10) ** 0.5)
    assert (prior.degrees, prior.between_degrees) == (6, 6)
    single = ConfigurationRuns(((1.0,),), num_levels=1)
    assert estimate_prior([single] * 5, PUBLISHED) is None


def test_the_variance_of_simulated_runs_is_found():
    rng = np.random.default_rng(1)
    configurations = [
        ConfigurationRuns(
            tuple(
                tuple(np.exp(rng.normal(0, 0.02) + rng.normal(0, 0.004, 3)).tolist())
                for _ in range(4)
            ),
            num_levels=1,
        )
        for _ in range(200)
    ]
    prior = estimate_prior(configurations, PUBLISHED)
    assert prior is not None and prior.within == pytest.approx(0.004, rel=0.1)
    # The level of a configuration is 1 here, not fitted: K / (K - 1) of the variance.
    assert prior.between == pytest.approx(0.02 * (4 / 3) ** 0.5, rel=0.1)


def test_other_configurations_of_the_machine_judge_two_runs(tmp_path: Path):
    """Published runs of CPUs vary by 1.5%; these vary by 0.1%."""
    root, pair = tmp_path / "runs", tmp_path / "pair"
    make_history(root, 0.001)
    a, b = (
        make_finished(pair, at, t, day=30 + at / 24, spec=spec_on(CPU))
        for at, t in ((90, 0.2), (91, 0.208))
    )
    names = pair, a.name, b.name
    before = compare_runs(*names, ComparisonOptions())
    assert before.verdict == "undecided" and "published pairs" in before.evidence

    assert "run-to-run variation: 0.68%" in calibrate(root)
    judged = compare_runs(*names, ComparisonOptions())
    assert (judged.verdict, judged.confidence) == ("slower", "low")
    assert "Runs of this machine vary by 0.68% within a day" in judged.sentence
    assert "32 runs of 8 configurations" in judged.sentence
    assert any("that of other runs on this machine" in reason for reason in judged.why_low)


def test_another_cpu_keeps_the_published_variation(tmp_path: Path):
    root, other = tmp_path / "runs", tmp_path / "other"
    make_history(root, 0.001)
    calibrate(root)
    spec = spec_on("Xeon 8480")
    a, b = (
        make_finished(other, at, t, spec=spec, day=at / 24) for at, t in ((90, 0.2), (91, 0.208))
    )
    judged = compare_runs(other, a.name, b.name, ComparisonOptions())
    assert judged.verdict == "undecided" and "published pairs" in judged.evidence


def test_imports_do_not_count_and_other_machines_are_kept(tmp_path: Path):
    root = tmp_path / "runs"
    make_history(root, 0.001)
    calibrate(root)
    stored = json.loads(variation_file().read_text())
    stored["machines"][0]["device_label"] = "another"
    variation_file().write_text(json.dumps(stored))
    calibrate(root)
    assert len(json.loads(variation_file().read_text())["machines"]) == 2
    assert estimate_machines(tmp_path / "none") == ()
    assert "no configuration has two runs" in calibrate(tmp_path / "none")
