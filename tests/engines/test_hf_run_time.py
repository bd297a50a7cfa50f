"""Hugging Face Trainer: the step time of a whole run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import ParsedLog
from paceline.logs.parser import parse_log
from tests.engines.test_hf_trainer import bar, check, entry, summary

STATED = (
    "***** Running training *****\n  Num examples = 1,000\n  Num Epochs = 1\n"
    "  Instantaneous batch size per device = 8\n"
    "  Total train batch size (w. parallel, distributed & accumulation) = 32\n"
    "  Gradient Accumulation steps = 1\n  Total optimization steps = 32\n"
)


def parsed(tmp_path: Path, text: str) -> ParsedLog:
    path = tmp_path / "train.log"
    path.write_text(text)
    return parse_log(path, UserSettings()).document


def test_the_step_time_is_run_time_over_steps_though_the_last_batch_is_a_part(tmp_path: Path):
    """1,000 samples are 31 batches of 32 and one of 8: 32 steps of 2 s."""
    log = parsed(tmp_path, STATED + entry(0.5) + summary(64.0, 15.625, train_steps_per_second=0.5))
    assert log.step_time_s is not None and log.step_time_s.median == 2.0
    assert log.samples_per_s == pytest.approx(15.625)
    assert log.disagreements == ()


def test_run_time_and_steps_are_enough(tmp_path: Path):
    text = STATED + entry(0.5) + "{'train_runtime': 64.0, 'train_loss': 2.1, 'epoch': 1.0}\n"
    log = parsed(tmp_path, text)
    assert log.status == "ok" and log.window is not None and log.window.rule == "as printed"
    assert log.step_time_s is not None and log.step_time_s.median == 2.0
    assert log.samples_per_s == 16.0


def test_bars_that_are_far_apart_tell_the_mean_step_between_them():
    """18, 36, ... of 97, 6.1 s a step behind a slow beginning; whole seconds over 18 steps."""
    shown = [(n, 40 + round(6.1 * n)) for n in (18, 36, 54, 72, 90)]
    text = "".join(
        entry(n / 97) + f" {n}%|##        | {n}/97 [{s // 60:02}:{s % 60:02}<08:00,  6.55s/it]\n"
        for n, s in shown
    )
    log = check(text)
    steps = log.steps()
    assert steps.index.tolist() == [18, 36, 54, 72, 90]
    assert np.isnan(steps["step_time_s"][0]), "the beginning is no step time"
    np.testing.assert_allclose(steps["step_time_s"][1:], 6.1, atol=1 / 18)
    assert log.resolution_s == pytest.approx(1 / 18)
    assert "whole seconds" in log.remarks[-1]


def test_steps_before_a_checkpoint_or_behind_an_early_stop_took_no_time(tmp_path: Path):
    resumed = STATED + "  Continuing training from global step 16\n"
    log = parsed(tmp_path, resumed + entry(0.5) + "{'train_runtime': 32.0}\n")
    assert log.step_time_s is not None and log.step_time_s.median == 2.0
    stopped = STATED + entry(0.5) + "{'train_runtime': 16.0}\n" + bar(8, of=32)
    assert check(stopped).figures["timed_steps"] == 8
