"""modded-nanogpt's running total of milliseconds, with and without losses."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.units import MIB
from paceline.engines import log_format
from tests.engines.promises import reader_of


# After train_gpt.py of KellerJordan/modded-nanogpt, 2024-2026.
def line(step: int, total_ms: float, loss: str = "") -> str:
    return (
        f"step:{step}/1750 {loss}train_time:{total_ms:.0f}ms "
        f"step_avg:{total_ms / max(step, 1):.2f}ms\n"
    )


check = reader_of("modded_nanogpt")


def test_times_are_differences_and_not_the_running_mean():
    log = check(line(1, 900) + line(2, 1045) + line(3, 1191))
    steps = log.steps()
    assert steps.index.tolist() == [1, 2, 3] and log.facts["total_steps"] == 1750
    assert steps["step_time_s"] == pytest.approx([0.9, 0.145, 0.146])
    assert log.resolution_s == pytest.approx(1e-3)


def test_a_line_of_a_validation_adds_no_step():
    text = line(124, 18_000) + line(125, 18_145) + line(125, 18_147, "val_loss:4.3719 ")
    steps = check(text + line(126, 18_292)).steps()
    assert steps.index.tolist() == [124, 125, 126]
    assert steps["step_time_s"][1:] == pytest.approx([0.145, 0.147])
    assert not steps.known("loss")


def test_validations_alone_tell_the_mean_between_them():
    text = "step:0/1480 val_loss:7.7109 train_time:0ms step_avg:nanms\n"
    text += line(125, 29_736, "val_loss:4.37 ") + line(250, 62_563, "val_loss:4.00 ")
    times = check(text).steps()["step_time_s"]
    assert times[2] == pytest.approx((62.563 - 29.736) / 125)


def test_a_clock_that_is_set_back_tells_nothing():
    steps = check(line(9, 40_000) + line(10, 40_200) + line(11, 150) + line(12, 300)).steps()
    assert np.isnan(steps["step_time_s"]).tolist() == [True, False, True, False]


def test_losses_of_training_are_kept():
    steps = check(line(1, 900, "train_loss:10.8258 ") + line(2, 1045, "train_loss:10.01 ")).steps()
    assert steps["loss"] == pytest.approx([10.8258, 10.01])


def test_seconds_with_two_decimals():
    text = (
        "step:1/100 | loss 10.825800 | train_time:0.90s | step_avg:900.00ms\n"
        "step:2/100 | loss 10.010000 | train_time:1.05s | step_avg:525.00ms\n"
    )
    assert log_format("modded_nanogpt").step_line.search(text.encode())
    log = check(text)
    assert log.steps()["step_time_s"] == pytest.approx([0.9, 0.15])
    assert log.steps()["loss"] == pytest.approx([10.8258, 10.01])
    assert log.resolution_s == pytest.approx(0.01)


def test_the_device_and_the_memory_are_kept():
    text = (
        "|   0  NVIDIA H100 80GB HBM3          On  |   00000000:04:00.0 Off |             0 |\n"
        + line(1, 900)
        + "peak memory allocated: 31234 MiB reserved: 45678 MiB\n"
    )
    log = check(text)
    assert log.facts["device"] == "NVIDIA H100 80GB HBM3"
    assert log.memory_bytes == {"allocated": 31234 * MIB, "reserved": 45678 * MIB}
    assert log.end_line is not None


def test_the_programs_text_at_the_top_is_no_step():
    code = 'print0(f"step:{step+1}/{train_steps} train_time:{approx:.0f}ms step_avg:{a:.2f}ms")\n'
    assert log_format("modded_nanogpt").step_line.search(code.encode()) is None
    assert check(code + line(1, 900)).steps().index.tolist() == [1]
