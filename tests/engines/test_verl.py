"""verl's lines: a step of reinforcement learning, and one of supervised tuning.

Two rates tell how many devices there are, where rounding leaves no doubt.
"""

from __future__ import annotations

import pytest

from paceline.core.units import GIB
from paceline.engines import log_format
from tests.engines.promises import reader_of


# After aggregate_logger.py, metric_utils.py and the SFT trainers of volcengine/verl, 2024-2026.
def line(step: int, seconds: float = 48.5, loss: str = "np.float64(0.0123)") -> str:
    return (
        f"(TaskRunner pid=4711) step:{step} - actor/entropy:0.43 - actor/pg_loss:{loss} - "
        "actor/grad_norm:np.float64(0.25) - perf/mfu/actor:0.21 - perf/mfu/ref:0.3 - "
        "perf/max_memory_allocated_gb:54.25 - perf/max_memory_reserved_gb:61.5 - "
        f"critic/score/mean:0.5 - timing_s/gen:16.2 - timing_s/step:{seconds} - "
        f"timing_per_token_ms/gen:0.17 - perf/total_num_tokens:1589248 - "
        f"perf/time_per_step:{seconds} - perf/throughput:{1_589_248 / seconds / 16}\n"
    )


check = reader_of("verl")


def test_a_line_is_read_to_its_figures():
    log = check(line(1))
    steps = log.steps()
    assert steps.index.tolist() == [1]
    assert steps["step_time_s"] == pytest.approx([48.5])
    assert steps["tokens"].tolist() == [1_589_248.0]
    assert steps["tokens_per_s_per_device"] == pytest.approx([1_589_248 / 48.5 / 16])
    assert steps["loss"] == pytest.approx([0.0123]) and steps["grad_norm"] == pytest.approx([0.25])
    assert steps["allocated_bytes"] == pytest.approx([54.25 * GIB])
    assert steps["reserved_bytes"] == pytest.approx([61.5 * GIB])


def test_what_a_step_is_is_said_and_the_mfu_of_a_phase_is_not_its_own():
    log = check(line(1))
    (remark,) = log.remarks
    assert "includes generation and update" in remark and "MFU of single phases" in remark
    assert not log.steps().known("mfu")


def test_an_mfu_above_one_is_reported():
    lines = "".join(
        f"step:{n} - actor/pg_loss:0.001 - perf/mfu/actor:{mfu} - timing_s/step:96.5\n"
        for n, mfu in enumerate((0.98, 1.018, 1.002), 1)
    )
    remarks = check(lines).remarks
    assert any("prints an MFU of 101.8% for actor" in remark for remark in remarks)


def test_the_devices_follow_from_the_two_rates():
    assert check(line(1)).facts == {"num_devices": 16}


@pytest.mark.parametrize("tokens", ["5892480", "589248"])
def test_one_odd_step_does_not_change_the_devices(tokens: str):
    odd = line(6).replace("total_num_tokens:1589248", f"total_num_tokens:{tokens}")
    text = "".join(line(step) for step in range(1, 6)) + odd
    assert check(text).facts == {"num_devices": 16}


def test_the_line_of_2024_has_three_decimals_and_only_timings():
    text = (
        "step:7 - actor/pg_loss:-0.012 - actor/grad_norm:0.250 - timing_s/gen:16.200 - "
        "timing_s/step:48.500\n"
    )
    assert log_format("verl").step_line.search(text.encode())
    log = check(text)
    assert log.steps()["step_time_s"] == pytest.approx([48.5])
    assert log.steps()["loss"] == pytest.approx([-0.012])
    assert log.resolution_s == pytest.approx(1e-3)


def test_supervised_tuning_prints_its_own_time():
    text = (
        "step:7 - train/loss:0.912 - train/grad_norm:1.25 - train/lr(1e-3):0.01 - "
        "train/time(s):1.234 - train/global_tokens:65536 - train/mfu:0.412\n"
    )
    assert log_format("verl").step_line.search(text.encode())
    log = check(text)
    steps = log.steps()
    assert steps["step_time_s"] == pytest.approx([1.234])
    assert steps["loss"] == pytest.approx([0.912]) and steps["mfu"] == pytest.approx([0.412])
    assert steps["tokens"].tolist() == [65_536.0]
    assert log.remarks == []


def test_the_last_time_that_is_printed_tells_its_digits_whatever_block_it_came_in():
    broken = line(3).replace(" - timing_s/step:48.5", " - timing_s/step::48.5")
    broken = broken.replace("perf/time_per_step:48.5", "perf/time_per_step:")
    assert check(line(1) + line(2, 48.25) + broken).resolution_s == pytest.approx(0.01)


def test_validations_are_no_steps():
    text = "step:0 - val-core/openai/gsm8k/reward/mean@1:0.32\n"
    assert check(text + line(1) + text.replace("step:0", "step:1")).steps().index.tolist() == [1]


def test_a_bar_beside_it_is_no_step_time():
    bar = "Training Progress:   1%|          | 1/435 [01:50<5:30:00, 110.0s/it]\r"
    assert check(bar + line(1) + bar + line(2)).steps()["step_time_s"].tolist() == [48.5] * 2


@pytest.mark.parametrize(
    ("of_all", "of_one", "count"),
    [
        (11_278.56, 1409.82, 8),
        (32_768.0, 32_767.9, 1),
        (14_200.0, 1780.0, 8),
        (256_300.0, 501.0, None),
        (1.0, 0.0, None),
        (0.0, 1.0, None),
        (1.0, 4.0, None),
        (float("nan"), 1.0, None),
        (float("inf"), 1.0, None),
        (1e99, 1e-99, None),
    ],
)
def test_the_whole_number_next_to_the_ratio(of_all: float, of_one: float, count: int | None):
    text = (
        f"step:1 - perf/total_num_tokens:{of_all} - perf/time_per_step:1.0 - "
        f"perf/throughput:{of_one}\n"
    )
    assert check(text).facts.get("num_devices") == count
