"""nanotron's lines: three digits and a letter, and the full numbers of 2023."""

from __future__ import annotations

import pytest

from paceline.core.units import TERA
from paceline.engines import log_format
from tests.engines.promises import reader_of
from tests.engines.recent_samples import NANOTRON_HEAD

# After trainer.py (train_step_logs) and logging (human_format) of huggingface/nanotron, 2024-2026.
PREFIX = "05/06/2026 13:47:27 [INFO|DP=0|PP=0|TP=0|node-07]: "


def line(step: int, time: str = "2.61K", batch: str = "1.02K", loss: str = "9.31") -> str:
    return (
        f"{PREFIX}iteration: {step} / 1000 | consumed_tokens: 634K | "
        f"elapsed_time_per_iteration_ms: {time} | tokens_per_sec: 201K | "
        f"tokens_per_sec_per_gpu: 25.1K | global_batch_size: {batch} | lm_loss: {loss} | lr: 1e-05 "
        "| model_tflops_per_gpu: 318 | hardware_tflops_per_gpu: 420 | grad_norm: 0.515 | "
        "cuda_memory_allocated: 15.2G | cuda_max_memory_reserved: 54.7B\n"
    )


check = reader_of("nanotron")


def test_a_line_is_read_to_its_figures():
    log = check(line(7))
    steps = log.steps()
    assert steps.index.tolist() == [7] and log.facts["total_steps"] == 1000
    assert steps["step_time_s"] == pytest.approx([2.61])
    assert steps["tokens_per_s_per_device"] == pytest.approx([25_100.0])
    assert steps["flops_per_s_per_device"] == pytest.approx([318 * TERA])
    assert steps["loss"] == pytest.approx([9.31]) and steps["grad_norm"] == pytest.approx([0.515])
    assert steps["reserved_bytes"] == pytest.approx([54.7e9])


def test_a_batch_cut_to_three_digits_is_no_batch():
    assert not check(line(7)).steps().known("global_batch")
    assert check(line(7, batch="256")).steps()["global_batch"].tolist() == [256.0]


@pytest.mark.parametrize(
    ("time", "resolution"), [("2.61K", 0.01), ("2.6K", 0.01), ("45", 1e-4), ("394", 1e-3)]
)
def test_three_digits_are_the_resolution(time: str, resolution: float):
    assert check(line(7, time)).resolution_s == pytest.approx(resolution)


def test_full_numbers_of_2023():
    text = (
        f"{PREFIX}iteration: 3 / 100 | consumed_samples:         3072 | "
        "elapsed_time_per_iteration_ms: 2613.4 | tokens_per_sec: 8.024E+05 | "
        "tokens_per_sec_per_gpu: 1.003E+05 | global_batch_size:  1024 | lm_loss: 1.0832E+01 | "
        "lr: 3.000E-04 | model_tflops_per_gpu: 120.50 | hardware_tflops_per_gpu: 120.50\n"
    )
    assert log_format("nanotron").step_line.search(text.encode())
    log = check(text)
    steps = log.steps()
    assert steps["step_time_s"] == pytest.approx([2.6134])
    assert steps["global_batch"].tolist() == [1024.0]
    assert log.resolution_s == pytest.approx(1e-4)


def test_the_configuration_is_kept_and_its_axes_make_the_devices():
    facts = check(NANOTRON_HEAD.decode() + line(1)).facts
    assert facts["num_devices"] == 8 and facts["tp"] == 4 and facts["pp"] == 1
    assert facts["micro_batch"] == 4 and facts["gradient_accumulation"] == 32
    assert facts["global_batch"] == 256 and facts["seq_len"] == 2048
