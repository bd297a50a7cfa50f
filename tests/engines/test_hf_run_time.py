"""Hugging Face Trainer: the step time of a whole run."""

from __future__ import annotations

from pathlib import Path

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


def test_steps_before_a_checkpoint_or_behind_an_early_stop_took_no_time(tmp_path: Path):
    resumed = STATED + "  Continuing training from global step 16\n"
    log = parsed(tmp_path, resumed + entry(0.5) + "{'train_runtime': 32.0}\n")
    assert log.step_time_s is not None and log.step_time_s.median == 2.0
    stopped = STATED + entry(0.5) + "{'train_runtime': 16.0}\n" + bar(8, of=32)
    assert check(stopped).figures["timed_steps"] == 8
