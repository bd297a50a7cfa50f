"""Steps that keep to no one level get the figure of their mean, and say so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.core.window import choose_window, steady_window, two_levels, uneven_warning
from paceline.files.documents import write_value
from paceline.files.run_folder import RUN_FILE
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from paceline.runs.outcome import evaluate
from tests.example import make_spec, make_steps, noisy
from tests.files.rank_files import step_times, write_ranks
from tests.files.test_run_folder import make_record
from tests.logs.example import megatron_log

IN_TURNS = [1.0, 1.0, 2.0, 1.0, 2.0] * 20


def test_levels_in_turns_are_an_uneven_window_of_all_steps():
    record = steady_window(make_steps(IN_TURNS)).record
    assert (record.state, record.n, record.n_warmup) == ("uneven", 100, 0)
    assert choose_window(make_steps(IN_TURNS), "skip:5").record.state == "uneven"


def test_the_two_levels_are_told():
    levels = two_levels(np.array(IN_TURNS))
    assert levels is not None
    assert (levels.low_s, levels.high_s, levels.high_share) == pytest.approx((1.0, 2.0, 0.4))
    warning = uneven_warning(np.array(IN_TURNS))
    assert warning.startswith("bimodal-steps: 60% of the steps take about 1 s and 40% about 2 s")
    slow = uneven_warning(20_000 * np.array(IN_TURNS))
    assert (
        "about 20,000 s and 40% about 40,000 s; the figures are those of the mean step, 28" in slow
    )


def test_a_period_is_not_lost_in_a_long_run():
    levels = two_levels(np.tile([1.0, 2.0], 10_000))
    assert levels is not None and levels.high_share == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_noise_spikes_and_rounding_are_one_level(seed: int):
    times = np.array(noisy(60, 1.0, 0.03, seed=seed))
    assert two_levels(times) is None
    spikes = times.copy()
    spikes[::6] += 1
    assert two_levels(spikes) is None
    assert two_levels(np.array([28.0, 29.0, 30.0] * 10), 1.0) is None
    assert two_levels(np.array([9.0, 10.0] * 10), 1.0) is None


@pytest.mark.parametrize("rule", [None, "auto", "1:100"])
def test_a_log_of_them_has_the_rate_of_its_mean_step(tmp_path: Path, rule: str | None):
    log = tmp_path / "train.log"
    log.write_text(megatron_log(IN_TURNS))
    document = parse_log(log, UserSettings(window=rule, seq_len=64)).document

    assert document.tokens_per_s == pytest.approx(128 * 64 * 100 / sum(IN_TURNS))
    step = document.metrics["step_time_s"]
    assert (step.value, step.statistic, step.low) == (pytest.approx(1.4), "mean", None)
    assert step.spread == pytest.approx(np.std(IN_TURNS) / 1.4)
    assert [w for w in document.warnings if w.startswith("bimodal-steps")]


def folder_of(tmp_path: Path, times: list[float]) -> Path:
    folder = tmp_path / "run"
    spec = make_spec(ranks=1)
    write_value(folder / RUN_FILE, make_record("ok", name="run", spec=spec))
    write_ranks(folder, spec, step_times(times))
    return folder


def test_a_run_of_them_has_figures_and_a_warning(tmp_path: Path):
    result = evaluate(folder_of(tmp_path, IN_TURNS)).result
    tokens = result.metrics["tokens_per_s"]
    assert result.status == "ok"
    assert tokens.value == pytest.approx(128 / 1.4)
    assert tokens.statistic == "at the mean step"
    assert result.metrics["step_time_s"].value == pytest.approx(1.4)
    assert [w[:14] for w in result.warnings] == ["bimodal-steps:"]
    assert "Not judged" not in result.verdict.sentence


@pytest.mark.parametrize("seed", range(12))
def test_a_short_run_has_a_figure_or_is_incomplete(tmp_path: Path, seed: int):
    times = [3.0, *noisy(7, 1.0, 0.1, seed=seed)]
    result = evaluate(folder_of(tmp_path, times)).result
    assert result.status == ("ok" if "step_time_s" in result.metrics else "incomplete")
    assert json.loads(result.model_dump_json())["verdict"]["sentence"] != "Not judged: ok."
