"""OLMo-core's records: a head, and a line a metric."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.units import GIB
from tests.engines.promises import parsed, reader_of

# After console_logger.py and speed_monitor.py of allenai/OLMo-core, 2025-2026.
LOGGER = "2026-05-06 13:47:27.123\tnode-07:0\tolmo_core.train.callbacks.console_logger:52\tINFO\t"


def record(step: int, rate: str = "0.4000", tokens: int = 4_194_304, first: str = "") -> str:
    seen = f"{tokens * step:,d}"
    return (
        f"{LOGGER}{first}[step={step}/1000,epoch=1,eta=3:12:01]\n"
        "    train/CE loss=7.125\n    train/PPL=1,242\n    optim/total grad norm=0.5125\n"
        "    optim/LR (group 0)=0.0003\n    throughput/device/data loading (s)=0.0010\n"
        "    throughput/device/TPS=13,107\n    throughput/device/TPS (actual avg)=9,999\n"
        f"    throughput/total tokens={seen}\n    throughput/device/BPS={rate}\n"
        "    throughput/device/BPS (actual avg)=0.1000\n    throughput/device/MFU=41.25\n"
        "    throughput/device/MFU (actual avg)=12.50\n"
        "    gpu_memory/GPU active mem (GiB)=54.32\n    gpu_memory/GPU reserved mem (GiB)=61.42\n"
    )


check = reader_of("olmo_core")


def test_a_record_is_read_to_its_figures_and_not_to_the_running_means():
    log = check(record(10) + record(20))
    steps = log.steps()
    assert steps.index.tolist() == [10, 20] and log.facts["total_steps"] == 1000
    assert steps["step_time_s"] == pytest.approx([2.5, 2.5])
    assert steps["tokens_per_s_per_device"] == pytest.approx([13_107.0] * 2)
    assert steps["mfu"] == pytest.approx([0.4125] * 2)
    assert steps["loss"] == pytest.approx([7.125] * 2)
    assert steps["grad_norm"] == pytest.approx([0.5125] * 2)
    assert steps["reserved_bytes"] == pytest.approx([61.42 * GIB] * 2)
    assert log.resolution_s == pytest.approx(1e-4 / 0.4**2)


def test_the_tokens_of_a_step_are_differences_of_the_total():
    tokens = check(record(10) + record(20)).steps()["tokens"]
    assert np.isnan(tokens[0]) and tokens[1] == 4_194_304


def test_the_first_step_has_a_loss_and_no_time():
    first = f"{LOGGER}[step=1/1000,epoch=1]\n    train/CE loss=11.93\n"
    steps = check(first + record(10)).steps()
    assert steps.index.tolist() == [1, 10]
    assert np.isnan(steps["step_time_s"]).tolist() == [True, False]


def test_heads_alone_are_no_steps():
    heads = "".join(f"{LOGGER}[step={n}/1000,epoch=1]\n" for n in range(2, 10))
    assert check(heads + record(10)).steps().index.tolist() == [10]


def test_the_device_and_the_peak_of_the_mfu_are_kept():
    text = f"{LOGGER}Device: NVIDIA H100 80GB HBM3, Device peak FLOPS: 989500000000000\n"
    log = check(text + record(10))
    assert log.facts["device"] == "NVIDIA H100 80GB HBM3"
    assert log.remarks == ["the log's MFU is relative to a peak of 9.895e+14 FLOP/s"]


def test_a_line_averages_no_other_steps_than_its_own(tmp_path):
    document = parsed(tmp_path / "a.log", "".join(record(n) for n in range(10, 300, 10)))
    assert document["n_steps"] == document["window"]["n"] + document["window"]["n_warmup"] == 29
