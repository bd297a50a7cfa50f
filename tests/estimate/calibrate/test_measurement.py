"""This machine, measured from beginning to end in a few seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.core.errors import SystemFaultError, UserError
from paceline.estimate.calibrate import cases, measurement
from tests.estimate.calibrate.micro import micro


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(data folder, recipe, what the command printed)."""
    folder = tmp_path_factory.mktemp("calibrated")
    few = {
        1: [(2, {"micro_batch": 8})],
        2: [(4, {"tp": 2, "micro_batch": 8}), (4, {"zero_stage": 3})],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder))
        patch.setattr(measurement, "PROBES_S", 0.4)
        patch.setattr(measurement, "STEPS", 4)
        patch.setattr(cases, "_layouts", lambda ranks: iter(few[ranks]))
        done = CliRunner().invoke(
            app,
            [
                "probe",
                "calibrate",
                micro(folder),
                "--device",
                "cpu",
                "--dtype",
                "fp32",
                "--ranks",
                "1,2",
                "--json",
            ],
        )
    assert done.exit_code == 0, (done.output, done.exception)
    return folder, micro(folder), done


def estimate(recipe: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["estimate", recipe, "--device", "cpu", *arguments])


def test_it_prints_and_keeps_one_document(calibrated: Any):
    folder, _, done = calibrated
    printed = json.loads(done.stdout)
    kept = json.loads(Path(printed["file"]).read_text())
    assert Path(printed["file"]).parent == folder / "paceline" / "calibrations"
    assert printed["steps"] == kept["steps"] and len(kept["steps"]) == 3
    assert [one["ranks"] for one in kept["placements"]] == [1, 2]
    assert all(
        one["flops_per_s"] > 0 and one["memory_bytes_per_s"] > 0 for one in kept["placements"]
    )
    assert kept["placements"][1]["link_bytes_per_s"] > 0
    assert all(step["measured_s"] > 0 and step["n"] == 2 for step in kept["steps"])
    assert "calibrate: probes on 2 x" in done.stderr


def test_an_estimate_of_this_processor_rests_on_it(
    calibrated: Any, monkeypatch: pytest.MonkeyPatch
):
    folder, recipe, _ = calibrated
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    done = estimate(recipe, "--gpus", "2", "--layout", "tp=2", "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(done.stdout)
    assert "measured here" in json.dumps(found["provenance"])
    assert found["step_time_s"] > 0 and found["mfu"] is None


def test_more_processes_than_cores_are_marked(calibrated: Any, monkeypatch: pytest.MonkeyPatch):
    folder, recipe, _ = calibrated
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    done = estimate(recipe, "--gpus", "1024", "--set", "training.global_batch=8192", "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    assert any("oversubscribed" in note for note in json.loads(done.stdout)["notes"])


def test_without_a_calibration_the_remedy_is_named(
    calibrated: Any, tmp_path: Path, monkeypatch: Any
):
    _, recipe, _ = calibrated
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    error = estimate(recipe, "--gpus", "1").exception
    assert isinstance(error, UserError) and "paceline probe calibrate" in str(error)


@pytest.mark.parametrize(
    "wrong", [["--ranks", "0"], ["--ranks", "a"], ["--dtype", "fp8"], ["--device", "tpu"]]
)
def test_wrong_options_are_refused(wrong: list[str]):
    done = CliRunner().invoke(app, ["probe", "calibrate", *wrong])
    assert done.exit_code != 0 and not isinstance(done.exception, SystemFaultError)


def test_what_cannot_be_kept_or_trained_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def never(*_: Any) -> Any:
        raise AssertionError("it measured")

    monkeypatch.setattr(measurement, "probe_rates", never)
    asked = ["probe", "calibrate", micro(tmp_path), "--device", "cpu", "--dtype", "fp32"]
    ranks = CliRunner().invoke(app, [*asked, "--ranks", "1,3"]).exception
    assert isinstance(ranks, UserError) and "--ranks 3" in str(ranks) and "fits no" in str(ranks)
    for out in (tmp_path, Path("/proc/none/x.json")):
        fault = CliRunner().invoke(app, [*asked, "--ranks", "1", "--output", str(out)]).exception
        assert isinstance(fault, SystemFaultError) and "cannot be written" in str(fault)
