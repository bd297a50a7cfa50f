"""Energy to train: of the timed part of each run, from the telemetry beside its log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.mlperf.score.energy import copy_telemetry
from paceline.mlperf.score.run_set import score
from paceline.mlperf.score.text import score_lines
from tests.mlperf.samples import EPOCH_MS, TEN
from tests.mlperf.submissions import ten_runs


def telemetry(path: Path, number: int, watts: float, until_s: float = 2000.0) -> None:
    """A host's file around run `number`, at constant power from before its initialisation."""
    path.parent.mkdir(exist_ok=True)
    begin = EPOCH_MS / 1000 + number * 7200
    lines = [
        {
            "event": "telemetry",
            "host": "a",
            "interval_s": 5.0,
            "unknown": {"cpu": "not read"},
            "sources": {"gpu": "nvidia-smi power.draw"},
        }
    ]
    lines += [
        {"event": "sample", "time_unix": begin + t, "gpus": [{"index": 0, "power_w": watts}]}
        for t in range(0, int(until_s), 5)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))


def test_the_energy_of_a_run_is_that_of_its_timed_part(tmp_path: Path):
    runs = ten_runs(tmp_path)
    for number in range(10):
        telemetry(runs / f"telemetry/result_{number}-a.jsonl", number, 700.0)
    scored = score(runs)

    for run, minutes in zip(scored.runs, TEN, strict=True):
        assert run.energy and run.energy.energy_j == pytest.approx(700 * minutes * 60)
        assert run.energy.power_w == pytest.approx(700)
    assert scored.mean_energy_j == pytest.approx(700 * 10.1875 * 60)
    text = "\n".join(score_lines(scored))
    assert (
        "energy       118.9 Wh to the target, mean of 8 runs, run_start to run_stop, at 700" in text
    )
    assert "of gpu (nvidia-smi power.draw)" in text


def test_hosts_are_added_and_a_dark_one_leaves_no_sum(tmp_path: Path):
    runs = ten_runs(tmp_path)
    telemetry(runs / "telemetry/result_1-a.jsonl", 1, 700.0)
    telemetry(runs / "telemetry/result_1-b.jsonl", 1, 500.0)
    telemetry(runs / "telemetry/result_2-a.jsonl", 2, 700.0, until_s=300)
    (runs / "telemetry/result_3-a.jsonl").write_text("nothing whole")
    scored = score(runs).runs

    assert scored[1].energy and scored[1].energy.energy_j == pytest.approx(1200 * 10.5 * 60)
    assert scored[2].energy and scored[2].energy.energy_j is None
    assert "was not sampled over the whole window" in str(scored[2].energy.reason)
    assert scored[3].energy and scored[3].energy.reason == "no telemetry was recorded"
    assert scored[0].energy is None  # result_1's files are not those of result_10 either
    unknown = score(runs)
    assert unknown.mean_energy_j is None
    assert any("energy       unknown: " in line for line in score_lines(unknown))


def test_without_telemetry_nothing_is_said_of_energy(tmp_path: Path):
    scored = score(ten_runs(tmp_path))

    assert scored.mean_energy_j is None and scored.status == "ok"
    assert not any("energy" in line for line in score_lines(scored))


def test_a_runs_telemetry_goes_beside_the_log_of_its_series(tmp_path: Path):
    (tmp_path / "run/telemetry").mkdir(parents=True)
    (tmp_path / "run/telemetry/host7.jsonl").write_text("x")
    (tmp_path / "series").mkdir()

    copy_telemetry(tmp_path / "run", tmp_path / "series", "result_4")
    copy_telemetry(tmp_path / "no-run", tmp_path / "series", "result_5")

    assert [p.name for p in (tmp_path / "series/telemetry").iterdir()] == ["result_4-host7.jsonl"]


def test_a_host_that_left_nothing_is_named_and_there_is_no_sum_without_it(tmp_path: Path):
    runs = ten_runs(tmp_path)
    (tmp_path / "run").mkdir()
    for number in range(10):
        telemetry(tmp_path / "run/telemetry/00000-a.jsonl", number, 700.0)
        copy_telemetry(tmp_path / "run", runs, f"result_{number}", ("a", "b", "c"))

    scored = score(runs)

    assert scored.mean_energy_j is None
    (reason,) = {run.energy.reason for run in scored.runs if run.energy}
    assert reason is not None and "gpu: b,c: no telemetry came from it" in reason
    assert any("energy       unknown: gpu: b,c" in line for line in score_lines(scored))
