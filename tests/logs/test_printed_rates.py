"""Rates as a log prints them, where nothing better is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import ParsedLog
from paceline.logs.parser import parse_log
from tests.engines.megatron_lines import MS, record

RLHF = (
    "|E2E latency=5.00s |Gather latency=0.00s (0.00%) |Generate time=1.74s (36.47%) "
    "|Training time=2.82s (59.05%) |Others=0.21 (4.48%)|CurSamplesPerSec=12.80 "
    "|AvgSamplesPerSec=12.03\n"
)
ONE_DEVICE = (
    "Model Parameters: 0.331 B, Latency: 0.50s, TFLOPs: 10.1, Samples/sec: 12.80, Time/seq 0.02s, "
    "Batch Size: 8, Sequence Length: 512\n"
)


def parsed(tmp_path: Path, text: str) -> ParsedLog:
    path = tmp_path / "train.log"
    path.write_text(text)
    return parse_log(path, UserSettings()).document


def test_reinforcement_learning_without_a_batch(tmp_path: Path):
    log = parsed(tmp_path, RLHF * 20)

    assert log.step_time_s is not None and log.step_time_s.median == 5.0
    assert log.samples_per_s == pytest.approx(12.8)
    assert log.metrics["samples_per_s"].statistic == "median of the printed rates"


def test_lines_that_lost_their_time_when_they_were_wrapped(tmp_path: Path):
    fields = {MS: None, "global batch size": None, "samples per second": "25.600"}
    log = parsed(tmp_path, "".join(record(n, fields).decode() for n in range(1, 21)))

    assert log.status == "ok" and log.samples_per_s == pytest.approx(25.6)
    assert log.step_time_s is None


def test_a_rate_that_may_be_of_one_device_is_not_the_runs(tmp_path: Path):
    log = parsed(tmp_path, ONE_DEVICE * 20)

    assert log.step_time_s is not None and log.samples_per_s is None
