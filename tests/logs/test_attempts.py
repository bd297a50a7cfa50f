"""Several runs in one file: the settings of one are not those of the other.

Rates as a log prints them, where nothing better is there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import ParsedLog
from paceline.logs.parser import parse_log
from tests.engines.megatron_specs import MS, record
from tests.engines.test_hf_trainer import STATED, entry, summary


def parsed(tmp_path: Path, text: str) -> ParsedLog:
    path = tmp_path / "train.log"
    path.write_text(text)
    return parse_log(path, UserSettings()).document


def megatron(world: int, length: int, batch: int, steps: int, time_s: float) -> str:
    """A run whose lines do not say their batch."""
    lines = [
        record(n, {MS: f"{1000 * time_s:.1f}", "global batch size": None})
        for n in range(1, steps + 1)
    ]
    return (
        f"using world size: {world}, data-parallel-size: {world}, "
        "tensor-model-parallel size: 1, pipeline-model-parallel size: 1 \n"
        "------------------------ arguments ------------------------\n"
        f"  global_batch_size ............................... {batch}\n"
        f"  seq_length ...................................... {length}\n"
        "-------------------- end of arguments ---------------------\n"
    ) + b"".join(lines).decode()


def maxtext(batch: int, steps: int, time_s: float) -> str:
    return (
        f"Config param global_batch_size_to_train_on: {batch}\n"
        "Config param max_target_length: 4096\nNum_devices: 8, shape (8,)\n"
    ) + "".join(f"completed step: {n}, seconds: {time_s}, loss: 2.5\n" for n in range(steps))


@pytest.mark.parametrize("last_is_long", [False, True])
def test_the_settings_are_those_of_the_steps(tmp_path: Path, last_is_long: bool):
    long, short = megatron(64, 4096, 512, 30, 2.0), megatron(8, 2048, 128, 8, 1.0)
    log = parsed(tmp_path, short + long if last_is_long else long + short)

    assert (log.settings.num_devices, log.settings.seq_len) == (64, 4096)
    assert log.samples_per_s == 256.0 and log.tokens_per_s == 256.0 * 4096


@pytest.mark.parametrize("last_is_long", [False, True])
def test_those_of_maxtext_too(tmp_path: Path, last_is_long: bool):
    long, short = maxtext(64, 30, 2.0), maxtext(8, 8, 1.0)
    log = parsed(tmp_path, short + long if last_is_long else long + short)

    assert log.settings.global_batch == 64 and log.samples_per_s == 32.0


def test_a_second_trainer_has_nothing_of_the_first(tmp_path: Path):
    second = "***** Running training *****\n" + entry(0.5) + summary(100.0, 20.0)
    text = STATED + entry(0.5) + summary(64.0, 15.625) + second
    log = parsed(tmp_path, text.replace(", 'train_steps_per_second': 0.457", ""))

    assert log.samples_per_s == 20.0
    assert log.settings.global_batch is None and log.step_time_s is None


def test_short_runs_one_after_the_other_are_no_ranks(tmp_path: Path):
    run = "".join(record(n, {MS: f"{1000 + n}.0"}).decode() for n in range(1, 5))
    log = parsed(tmp_path, run * 3)

    assert log.n_steps == 12
    assert [warning for warning in log.warnings if "start over 2 times" in warning]


RLHF = (
    "|E2E latency=5.00s |Gather latency=0.00s (0.00%) |Generate time=1.74s (36.47%) "
    "|Training time=2.82s (59.05%) |Others=0.21 (4.48%)|CurSamplesPerSec=12.80 "
    "|AvgSamplesPerSec=12.03\n"
)
ONE_DEVICE = (
    "Model Parameters: 0.331 B, Latency: 0.50s, TFLOPs: 10.1, Samples/sec: 12.80, Time/seq 0.02s, "
    "Batch Size: 8, Sequence Length: 512\n"
)


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
