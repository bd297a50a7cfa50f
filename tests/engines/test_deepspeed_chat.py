"""DeepSpeed-Chat logs: four ways of telling the speed, of which the most specific counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.units import GIB, TERA
from paceline.engines.deepspeed_chat import LOG_FORMAT
from paceline.engines.log_reading.log_content import LogContent
from paceline.files.log_file import LogFile
from tests.engines.promises import check_read

EIGHT_RANKS = b"[INFO] [launch.py:164:main] dist_world_size=8\n"
RESULT = b"Execution time: 18.6705 seconds for 90 steps\nThroughput: 59233.5004 samples/sec\n"


def timer(step: int, current: str, average: str = "700.5", peak: str = "33.78") -> bytes:
    return (
        f"[2025-01-02 03:04:05,678] [INFO] [timer.py:258:stop] epoch=0/micro_step={step}/"
        f"global_step={step}, RunningAvgSamplesPerSec={average}, CurrSamplesPerSec={current}, "
        f"MemAllocated=5.53GB, MaxMemAllocated={peak}GB\n"
    ).encode()


def rlhf(step: int, latency: str, rate: str, average: str = "10.00") -> bytes:
    return (
        f"epoch: 0|step: {step}|ppo_ep: 1|act_loss: 0.0{step + 1}|cri_loss: 0.02"
        "|unsuper_loss: 0.0\n"
        "average reward score: -0.35\n-----\n"
        f"|E2E latency={latency}s |Gather latency=0.19s (1.58%) |Generate time=7.18s (60.18%) "
        f"|Training time=3.94s (33.00%) |Others=0.81 (6.82%)|CurSamplesPerSec={rate} "
        f"|AvgSamplesPerSec={average}\n"
    ).encode()


def perf(latency: str, tflops: str = "11.25", samples: str = "120.00") -> bytes:
    return (
        f"Model Parameters: 0.331 B, Latency: {latency}s, TFLOPs: {tflops}, "
        f"Samples/sec: {samples}, Time/seq 0.01s, Batch Size: 24, Sequence Length: 512\n"
    ).encode()


def breakdown(forward: str, backward: str, update: str) -> bytes:
    return (
        "[Rank 0] time (ms) | compute_norm: 0.12 | overflow_check: 0.65 | basic_step: 0.24\n"
        f"[Rank 0] time (ms) | fwd_microstep: {forward} | bwd_microstep: {backward} | "
        f"bwd_inner_microstep: 1.00 | bwd_allreduce_microstep: 0.88 | step_microstep: {update}\n"
        f"[Rank 0] time (ms) | fwd: {forward} | bwd: {backward} | bwd_inner: 1.00 | "
        f"bwd_allreduce: 0.88 | step: {update}\n"
    ).encode()


def read_file(path: Path) -> LogContent:
    log = LogContent()
    LOG_FORMAT.read(LogFile(path), log)
    return log


# What the eye reads in the public logs: numbers of the first, middle and last timer line, the two
# result lines, and the launch command.
PUBLIC: dict[str, dict[str, Any]] = {
    "lambda_1cc-64xN_1node_1xN_opt-13b_bs16_zero0_opt-13b_1_1xN_batch0001.log": {
        "rates": (72.49929535887543, 73.15026183053972, 73.09988376093885),
        "throughput": (72.9532, 175.4549, 100),
        "average": 73.0102121870404,
        "peak_gib": 40.72,
        "facts": {"model": "facebook/opt-13b", "micro_batch": 16, "global_batch": 128,
                  "num_devices": 8},
    },
    "lambda_1cc-64xN_1node_1xN_opt-350m_bs24_zero0_opt-350m_1_1xN_batch0001.log": {
        "rates": (919.950613447874, 945.5648369609248, 1065.0989014477188),
        "throughput": (943.4550, 20.3507, 100),
        "average": 950.7571805799944,
        "peak_gib": 33.78,
        "facts": {"model": "facebook/opt-350m", "micro_batch": 24, "global_batch": 192,
                  "num_devices": 8},
    },
    "lambda_1cc-64xN_allnodes_2xN_opt-350m_bs24_zero0_opt-350m_1_2xN_batch0001.log": {
        "rates": (1755.2277015591608, 1882.4233771151676, 1878.3400577982102),
        "throughput": (1874.1065, 20.4898, 100),
        "average": 1892.1307254706182,
        "peak_gib": 33.78,
        "facts": {"model": "facebook/opt-350m", "micro_batch": 24, "global_batch": 384,
                  "num_devices": 16},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_supervised_log_says_what_the_eye_reads(name: str, reference_data: Path):
    log, seen = read_file(reference_data / "logs" / name), PUBLIC[name]
    steps = log.steps()
    rate, seconds, timed = seen["throughput"]

    assert steps.index.tolist() == list(range(10, 111, 10))
    np.testing.assert_allclose(steps["samples_per_s"][[0, 5, 10]], seen["rates"], rtol=1e-6)
    assert log.figures == {
        "samples_per_s": rate,
        "run_time_s": seconds,
        "timed_steps": timed,
        "running_samples_per_s": seen["average"],
    }
    assert log.memory_bytes == {"allocated": pytest.approx(seen["peak_gib"] * GIB)}
    assert log.facts == {
        **seen["facts"],
        "seq_len": 512,
        "zero_stage": 0,
        "dtype": "fp16",
        "log_interval": 1,
        "gradient_accumulation": 1,
        "framework_version": "0.14.4",
    }
    assert log.remarks == ["9 of the first 110 steps were skipped (fp16 overflow)"]
    assert log.end_line and "exits successfully" in log.end_line and log.incomplete_reason is None


def test_the_public_log_of_reinforcement_learning_says_what_the_eye_reads(reference_data: Path):
    log = read_file(reference_data / "logs" / "lambda_batch1_opt-13b_step3_1xN_batch1.log")
    steps = log.steps()

    assert steps.index.tolist() == list(range(9))
    assert steps["step_time_s"].tolist() == [
        11.94, 14.45, 13.74, 13.04, 12.74, 12.61, 12.60, 12.76, 12.99,
    ]  # fmt: skip
    assert steps["samples_per_s"].tolist() == pytest.approx(
        [10.72, 8.86, 9.32, 9.82, 10.04, 10.15, 10.16, 10.03, 9.85]
    )
    assert steps["loss"][[0, 8]].tolist() == [0.03057861328125, 0.0208587646484375]
    assert log.figures == {
        "samples_per_s": 9.8183,
        "run_time_s": 130.3683,
        "timed_steps": 10,
        "running_samples_per_s": 9.86,
    }
    assert log.memory_bytes == {"allocated": pytest.approx(35.63 * GIB)}
    assert log.facts["model"] == "facebook/opt-13b" and log.facts["seq_len"] == 512
    assert log.facts["zero_stage"] == 3 and log.facts["global_batch"] == 128
    assert log.resolution_s == pytest.approx(0.01)


def test_the_throughput_of_the_timed_steps_is_the_runs_figure():
    log = check_read(LOG_FORMAT, RESULT)

    assert log.figures == {"samples_per_s": 59233.5004, "run_time_s": 18.6705, "timed_steps": 90}
    assert len(log) == 0 and LOG_FORMAT.whole_run


def test_a_throughput_without_a_decimal_point_counts():
    log = check_read(LOG_FORMAT, b"ml-512-node-001: Throughput: 73 samples/sec\n")

    assert log.figures == {"samples_per_s": 73.0}


def test_the_first_throughput_counts_and_others_are_told():
    log = check_read(LOG_FORMAT, RESULT + b"Throughput: 12.5 samples/sec\n" * 2)

    assert log.figures["samples_per_s"] == 59233.5004
    assert "3 throughput lines have 2 different values; the first one is used" in log.remarks


def test_a_throughput_that_is_repeated_is_no_contradiction():
    assert check_read(LOG_FORMAT, RESULT * 3).remarks == []


def test_the_timer_gives_the_rate_of_single_steps_and_a_running_average():
    lines = timer(10, "690.25", "720.5") + timer(20, "688.75", "701.25", "35.5")
    log = check_read(LOG_FORMAT, lines)
    steps = log.steps()

    assert steps.index.tolist() == [10, 20]
    assert steps["samples_per_s"].tolist() == [690.25, 688.75]
    assert log.figures == {"running_samples_per_s": 701.25}
    assert log.memory_bytes == {"allocated": 35.5 * GIB}
    assert log.facts["log_interval"] == 1


def test_an_old_timer_prints_only_a_running_average_which_is_the_runs_figure():
    line = (
        "[INFO] [timer.py:189:stop] {}/{}, SamplesPerSec={}, MemAllocated=0.2GB, "
        "MaxMemAllocated=9.0GB\n"
    )
    log = check_read(LOG_FORMAT, (line.format(0, 10, 83.5) + line.format(0, 20, 83.25)).encode())

    assert len(log) == 0
    assert log.figures == {"samples_per_s": 83.25, "running_samples_per_s": 83.25}
    assert log.memory_bytes == {"allocated": 9.0 * GIB}
    assert "only a running average" in log.remarks[0]


def test_an_old_timer_that_counts_within_its_epoch_goes_on_counting():
    line = "[timer.py:181:stop] {}/{}, RunningAvgSamplesPerSec=8.5, CurrSamplesPerSec={}\n"
    rows = [(0, 10, 8.25), (0, 20, 8.5), (1, 10, 8.75), (1, 20, 9.0), (2, 10, 9.25)]
    log = check_read(LOG_FORMAT, "".join(line.format(*row) for row in rows).encode())
    steps = log.steps()

    assert steps.index.tolist() == [10, 20, 30, 40, 50]
    assert steps["samples_per_s"].tolist() == [8.25, 8.5, 8.75, 9.0, 9.25]


def test_the_steps_of_reinforcement_learning_go_before_the_timer_of_the_actor():
    text = timer(1, "64.0") + b"".join(rlhf(k, f"1{k}.50", f"{9 - k}.25") for k in range(3))
    log = check_read(LOG_FORMAT, text)
    steps = log.steps()

    assert steps.index.tolist() == [0, 1, 2]
    assert steps["step_time_s"].tolist() == [10.5, 11.5, 12.5]
    assert steps["samples_per_s"].tolist() == [9.25, 8.25, 7.25]
    assert steps["loss"].tolist() == pytest.approx([0.01, 0.02, 0.03])
    assert log.figures == {"running_samples_per_s": 10.0}
    assert "only the actor's update" in log.remarks[0]


def test_steps_of_reinforcement_learning_are_counted_on_through_epochs():
    log = check_read(LOG_FORMAT, b"".join(rlhf(k % 2, "9.50", "8.00") for k in range(4)))

    assert log.steps().index.tolist() == [0, 1, 2, 3]


def test_a_hybrid_engine_without_a_batch_size_prints_no_rate():
    line = b"|E2E latency=9.50s |Gather latency=0.19s (1.58%) |Others=0.81 (6.82%)\n"
    steps = check_read(LOG_FORMAT, line + rlhf(1, "8.50", "7.00")).steps()

    assert steps["step_time_s"].tolist() == [9.5, 8.5]
    np.testing.assert_array_equal(steps["samples_per_s"], [np.nan, 7.0])


def test_the_performance_line_counts_all_devices_and_has_the_loss_before_it():
    text = b"".join(
        f"Epoch: 0, Step: {k}, Rank: 0, loss = {3 - k}.5\n".encode() + perf(f"0.{k + 1}0")
        for k in range(3)
    )
    log = check_read(LOG_FORMAT, EIGHT_RANKS + text)
    steps = log.steps()

    assert steps.index.tolist() == [1, 2, 3]
    assert steps["step_time_s"].tolist() == [0.1, 0.2, 0.3]
    assert steps["loss"].tolist() == [3.5, 2.5, 1.5]
    assert steps["samples_per_s"].tolist() == [8 * 120.0] * 3
    assert steps["flops_per_s_per_device"].tolist() == pytest.approx([8 * 11.25 * TERA] * 3)
    assert log.facts == {"num_devices": 8, "micro_batch": 24, "seq_len": 512, "log_interval": 1}
    assert LOG_FORMAT.convention == "megatron-deepspeed+recompute"


def test_a_printed_rate_that_is_finer_than_the_time_gives_the_step_time():
    line = perf("0.17", samples="12.36").replace(b"Batch Size: 24", b"Batch Size: 2")
    log = check_read(LOG_FORMAT, b"[INFO] dist_world_size=2\n" + line * 3)

    assert log.steps()["step_time_s"].tolist() == pytest.approx([2 / 12.36] * 3)
    assert log.steps()["samples_per_s"].tolist() == pytest.approx([24.72] * 3)
    assert log.resolution_s == pytest.approx(2 / 12.36 * 0.01 / 12.36)


def test_the_performance_line_of_an_unknown_number_of_devices_gives_times_only():
    log = check_read(LOG_FORMAT, perf("0.10") * 3)

    assert log.steps()["step_time_s"].tolist() == [0.1] * 3
    assert not log.steps().known("samples_per_s")
    assert log.remarks == ["the printed rates are those of one device and are left out"]


def test_the_breakdown_gives_every_steps_time_and_the_throughput_stays_the_figure():
    text = breakdown("79.01", "80.51", "6.06") + breakdown("36.32", "78.48", "1.58")
    log = check_read(LOG_FORMAT, text + timer(10, "955.5") + RESULT)

    assert log.steps().index.tolist() == [1, 2]
    assert log.steps()["step_time_s"].tolist() == pytest.approx([0.16558, 0.11638])
    assert log.figures["samples_per_s"] == 59233.5004
    assert "without waiting for data" in log.remarks[0]


def test_a_breakdown_that_is_cut_off_is_no_step():
    text = breakdown("79.01", "80.51", "6.06")
    log = check_read(LOG_FORMAT, text + text[:-2])

    assert len(log) == 1


def test_the_performance_line_of_reinforcement_learning_has_the_batch_of_all():
    line = (
        b"End-to-End => Latency: 11.94s, TFLOPs: 8.50, Samples/sec: 10.72, Time/seq 0.09s, "
        b"Batch Size: 128, Total Seq. Length: 512\n"
        b"Generation => Latency: 7.18s, Per-token Latency 28.05 ms, TFLOPs: 1.00, BW: 9.00 GB/sec, "
        b"Answer Seq. Length: 256\nTraining   => Latency: 3.94s, TFLOPs: 20.00\n"
    )
    log = check_read(LOG_FORMAT, line * 2)

    assert log.steps()["step_time_s"].tolist() == [11.94, 11.94]
    assert log.facts == {"seq_len": 512, "log_interval": 1}


def test_the_performance_line_goes_before_the_timer_whose_average_is_kept():
    log = check_read(LOG_FORMAT, perf("0.20") * 10 + timer(10, "960.0", "955.5"))

    assert len(log) == 10
    assert log.figures == {"running_samples_per_s": 955.5}


def test_a_lost_loss_is_told_as_infinite():
    text = b"Epoch: 0, Step: 0, Rank: 0, loss = nan\n" + perf("0.20")

    assert check_read(LOG_FORMAT, text).steps()["loss"].tolist() == [np.inf]


def test_skipped_steps_are_told_once():
    line = b"[INFO] [logging.py:96:log_dist] [Rank 0] step=%d, skipped=%d, lr=[1e-4]\n"
    lines = line % (10, 7) + line % (20, 9) + line % (30, 9)
    log = check_read(LOG_FORMAT, lines + timer(30, "9.5"))

    assert log.remarks == ["9 of the first 30 steps were skipped (fp16 overflow)"]
    log = check_read(LOG_FORMAT, line % (10, 1) + timer(10, "9.5"))
    assert log.remarks == ["1 of the first 10 steps was skipped (fp16 overflow)"]


@pytest.mark.parametrize("text", [timer(10, "9.5"), rlhf(1, "9.50", "8.25"), perf("0.25"), RESULT])
def test_a_last_line_without_a_line_end_is_whole_if_its_record_is(text: bytes):
    log = check_read(LOG_FORMAT, text.rstrip(b"\n"))

    assert log.incomplete_reason is None
    assert len(log) == 1 or log.figures["samples_per_s"] == 59233.5004


def test_other_tools_throughput_lines_are_not_read():
    text = b"Throughput: 5000 tokens/s\nthroughput: 12 samples/sec\nsamples/sec\n"

    assert not check_read(LOG_FORMAT, text).figures
    assert LOG_FORMAT.step_line.search(text) is None
