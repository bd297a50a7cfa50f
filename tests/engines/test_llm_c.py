"""llm.c's table and lines, of the CUDA program and of its reference in Python."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.units import MIB
from paceline.engines import log_format
from tests.engines.promises import reader_of
from tests.engines.recent_samples import LLM_C_HEAD


# After train_gpt2.cu and train_gpt2.py of karpathy/llm.c, 2024.
def line(step: int, ms: float = 1234.56, share: str = "41.5%", loss: str = "7.125000") -> str:
    return (
        f"step {step:4d}/19560 | loss {loss} (+nanz)| norm 1.2500 (-0.31z)| lr 8.57e-07 | "
        f"{ms:.2f} ms | {share} bf16 MFU | 99999 tok/s\n"
    )


check = reader_of("llm_c")


def test_a_line_is_read_to_its_figures_and_not_to_the_moving_average():
    log = check(line(7))
    steps = log.steps()
    assert steps.index.tolist() == [7] and log.facts["total_steps"] == 19560
    assert steps["step_time_s"] == pytest.approx([1.23456])
    assert steps["loss"] == pytest.approx([7.125]) and steps["grad_norm"] == pytest.approx([1.25])
    assert steps["mfu"] == pytest.approx([0.415])
    assert not steps.known("tokens_per_s_per_device")
    assert log.resolution_s == pytest.approx(1e-5)


def test_an_mfu_of_a_device_that_it_does_not_know_is_none():
    steps = check(line(1, share="-100.0%") + line(2)).steps()
    assert np.isnan(steps["mfu"]).tolist() == [True, False]


def test_the_reference_in_python():
    text = (
        "step    3/100 | train loss 5.270000 | norm 30.9000 | lr 1.00e-04 | "
        "(1234.56 ms | 3317 tok/s)\n"
    )
    assert log_format("llm_c").step_line.search(text.encode())
    steps = check(text).steps()
    assert steps["step_time_s"] == pytest.approx([1.23456])
    assert steps["loss"] == pytest.approx([5.27]) and steps["grad_norm"] == pytest.approx([30.9])


def test_the_table_is_kept():
    log = check(LLM_C_HEAD.decode() + line(1))
    facts = dict(log.facts)
    assert facts.pop("log_interval") == 1 and facts.pop("total_steps") == 19560
    assert facts == {
        "micro_batch": 16,
        "seq_len": 1024,
        "global_batch": 512,
        "device": "NVIDIA H100 80GB HBM3",
        "dtype": "bf16",
        "num_layers": 12,
        "num_parameters": 124_475_904,
        "num_devices": 8,
        "zero_stage": 1,
        "gradient_accumulation": 4,
    }
    assert log.memory_bytes == {"used": 21315 * MIB}


def test_its_last_word_is_kept():
    end = "total average iteration time: 1234.560000 ms\n"
    assert check(line(1) + end).end_line == end.strip()
