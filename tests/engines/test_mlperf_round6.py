"""Logs of round 6.0: two writers of `train_step_time`, and submissions without step lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engines.log_reading.mllog import records
from paceline.engines.mlperf import LOG_FORMAT
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from paceline.mlperf.result_logs import trials_of
from tests.engines.promises import check_read
from tests.engines.test_mlperf import BEGIN, END, line, stats


def two_writers(num_steps: int = 40, batch: int = 8, block: int = 10) -> bytes:
    """Steps of 0.45 s by one rank, means of blocks by another; the first holds a start."""
    text = b""
    for step in range(1, num_steps + 1):
        single = {"train_step_time": 0.45, "reduced_train_loss": 5.0}
        text += b"6144: " + stats(single, samples_count=step * batch)
        if step % block == 0:
            mean = 0.504 if step == block else 0.46
            text += b"0: " + stats({"train_step_time": mean}, samples_count=block * batch)
    return text


def test_steps_that_state_their_samples_and_loss_are_single_steps():
    log = check_read(LOG_FORMAT, BEGIN + two_writers() + END)

    steps = log.steps()
    assert steps.index.tolist() == list(range(1, 41))
    assert set(steps["step_time_s"].tolist()) == {0.45}
    assert log.facts["log_interval"] == 1


def test_without_a_batch_such_steps_are_counted():
    batchless = BEGIN.replace(line("global_batch_size", 8), b"")
    log = check_read(LOG_FORMAT, batchless + two_writers(6) + END)

    assert log.steps().index.tolist() == [1, 2, 3, 4, 5, 6]


def test_the_rate_of_a_run_is_that_of_its_single_steps():
    few_steps = two_writers(num_steps=4, block=2)
    (trial,) = trials_of(records([BEGIN + few_steps + END]))
    assert trial.median_samples_per_s == pytest.approx(8 / 0.45)
    (blocks,) = trials_of(records([BEGIN + stats({"train_step_time": 0.5}) + END]))
    assert blocks.median_samples_per_s == 16.0


def test_a_printed_overall_rate_counts_where_no_line_tells_a_speed(tmp_path: Path):
    path = tmp_path / "result_0.txt"
    path.write_bytes(BEGIN + END + line("overall_throughput", 35.61, samples=3072))
    document = parse_log(path, UserSettings()).document
    assert (document.status, document.samples_per_s) == ("ok", 35.61)

    path.write_bytes(BEGIN + END)
    silent = parse_log(path, UserSettings()).document
    assert silent.status == "not-a-training-log"
    assert silent.reason == "it is complete but reports no step time and no throughput"


@pytest.mark.parametrize(
    ("place", "num_steps", "median_s"),
    [
        ("NVIDIA/theia_ngpu8_ngc26.04_nemo/gpt_oss_20b/result_0.txt", 288, 0.4927),
        ("NVIDIA/theia_ngpu8_ngc26.04_nemo/llama2_70b_lora/result_0.txt", 38, 0.7258),
        ("NVIDIA/tyche-hsg_ngpu8192_ngc26.04_nemo/deepseekv3_671b/result_0.excerpt.txt", 8, 3.498),
    ],
)
def test_public_logs_give_their_single_steps(
    reference_data: Path, place: str, num_steps: int, median_s: float
):
    parsing = parse_log(reference_data / "mlperf" / "v6.0" / place, UserSettings())
    times = parsing.document.step_time_s
    assert len(parsing.steps) == num_steps
    assert times is not None and times.median == pytest.approx(median_s, rel=2e-3)
