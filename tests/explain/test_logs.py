"""Training logs are explained as far as they go."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.explain.diagnosis import explain
from paceline.explain.report import explanation_document
from paceline.logs.facts import UserSettings
from paceline.report.terminal import plain_text
from tests.command import paceline

LINE = (
    " iteration {step:8d}/     200 | consumed samples: {samples:12d} | elapsed time per iteration "
    "(ms): {ms:.1f} | learning rate: 1.0E-05 | global batch size:    64 | lm loss: 1.0E+01 |\n"
)
SETTINGS = UserSettings(model="llama31-8b", device="H100", num_devices=8, seq_len=8192)


def write_log(path: Path, seconds: Iterable[float]) -> Path:
    path.write_text(
        "".join(
            LINE.format(step=step, samples=64 * step, ms=1000 * each)
            for step, each in enumerate(seconds, 1)
        )
    )
    return path


def test_a_few_slow_steps_are_a_cause_with_the_time_they_cost(tmp_path: Path) -> None:
    log = write_log(tmp_path / "train.log", [8.0 if step % 15 == 14 else 2.0 for step in range(60)])

    answer = explain(log, None, tmp_path)

    (cause,) = answer.causes
    assert cause.cause == "slow steps"
    assert cause.seconds == pytest.approx(6.0 * 4 / 60, rel=0.1)
    assert answer.parts_s["compute"] == pytest.approx(2.0)
    assert "what ranks wait for" in answer.notes[-1]


def test_a_steady_log_has_no_cause(tmp_path: Path) -> None:
    answer = explain(write_log(tmp_path / "train.log", [2.0] * 60), None, tmp_path)

    assert answer.causes == () and answer.lost_s == pytest.approx(0)


def test_a_log_with_known_model_and_gpus_is_compared_with_the_estimate(tmp_path: Path) -> None:
    log = write_log(tmp_path / "train.log", [40.0] * 60)

    answer = explain(log, None, tmp_path, settings=SETTINGS)

    assert answer.baseline_kind == "estimate" and answer.baseline_s is not None
    assert answer.baseline_s == pytest.approx(7, rel=0.5)
    assert answer.lost_s == pytest.approx(40 - answer.baseline_s)
    text = plain_text(explanation_document(answer))
    slower = 40 / answer.baseline_s - 1
    assert f"{slower:.0%} slower than the baseline by no recorded cause" in text
    assert "`paceline probe profile`" in text and "no cause found" not in text


def test_a_stored_log_is_compared_with_the_estimate_like_the_log_itself(tmp_path: Path) -> None:
    log, runs = write_log(tmp_path / "train.log", [40.0] * 60), tmp_path / "runs"
    settings = ("--model", "llama31-8b", "--gpu", "H100", "--gpus", 8, "--seq-len", 8192)
    assert paceline("runs", "import", log, *settings, runs=runs).returncode == 0
    (stored,) = runs.glob("*/run.json")

    answer = explain(stored.parent, None, runs)

    assert answer.baseline_kind == "estimate"
    assert answer.baseline_s == explain(log, None, tmp_path, settings=SETTINGS).baseline_s


def test_a_stored_log_without_settings_takes_them_from_the_command(tmp_path: Path) -> None:
    log, runs = write_log(tmp_path / "train.log", [40.0] * 60), tmp_path / "runs"
    assert paceline("runs", "import", log, runs=runs).returncode == 0
    (stored,) = runs.glob("*/run.json")

    assert explain(stored.parent, None, runs).baseline_kind == "itself"
    answer = explain(stored.parent, None, runs, settings=SETTINGS)

    assert answer.baseline_kind == "estimate"


def test_an_estimate_names_the_settings_that_a_log_does_not_state(tmp_path: Path) -> None:
    log = write_log(tmp_path / "train.log", [2.0] * 60)

    with pytest.raises(UserError, match=r"--against estimate: needs .* --model, --gpu, --gpus"):
        explain(log, "estimate", tmp_path)


def test_the_command_takes_logs_on_both_sides(tmp_path: Path) -> None:
    fast = write_log(tmp_path / "fast.log", [2.0] * 60)
    slow = write_log(tmp_path / "slow.log", [2.5] * 60)

    done = paceline("explain", str(slow), "--against", str(fast), runs=tmp_path / "runs")

    assert done.returncode == 0, done.stderr
    assert "0.500 s more than run" in done.stdout and "fast.log" in done.stdout
