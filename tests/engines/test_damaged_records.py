"""Damaged logs say the same wherever a block ends. Each text is one that a long fuzz has found."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engines.promises import reader_of

PROGRESS = (
    "2026-01-01 00:00:28.214\tJob ID: 1\t# GPUs: 64\tSaving async checkpoint\tIteration: 1\t"
    "Job throughput: 212.7 TFLOP/s/GPU\tTokens (in billions): 0.002100\n"
    "2026-01-01 00:00:37.691\tJob ID: 1\t# GPUs: 64\tSaving async checkpoint\tIteration: 2\t"
    "Job throughput: 633.1 TFLOP/s/GPU\tTokens (in billions): 0.0042{damage}\n"
)
TIMER = (
    "[INFO] [timer.py:258:stop] epoch=0/micro_step=10/global_step=1{damage}, "
    "RunningAvgSamplesPerSec=6.73, CurrSamplesPerSec=6.80, MemAllocated=5.53GB, "
    "MaxMemAllocated=33.78GB\n"
)
RECORD = (
    "===={color} Step {step}/100 =====\n"
    "Training Results:\n"
    "  * Loss: 0.0812\n"
    "Timing:\n"
    "  * Total step time: {time}s\n"
)
PROFILE = (
    "-------------------------- DeepSpeed Flops Profiler --------------------------\n"
    "Profile Summary at step 2:\n"
    "world size:                                                   8\n"
    "iter latency:                                                 9477.54 ms\n"
    "samples/second:                                               {rate}\n"
)


def test_a_field_at_the_end_of_a_line_counts_whatever_other_lines_lack() -> None:
    log = reader_of("megatron_progress")(PROGRESS.format(damage="5.0 TFLOP/s/GPU"))

    assert log.steps()["tokens"][0] == 2.1e6 and np.isnan(log.steps()["tokens"][1])


def test_an_older_form_of_a_line_counts_only_in_a_log_without_the_newer_one() -> None:
    old, new = TIMER.format(damage="/0"), TIMER.format(damage="0")

    assert reader_of("deepspeed_chat")(old + new).steps().index.tolist() == [10]
    assert reader_of("deepspeed_chat")(new + old).steps().index.tolist() == [10]


def test_a_mark_with_a_color_code_inside_begins_no_record() -> None:
    first, second = (
        RECORD.format(color="\x1b[0m", step=1, time=9.5),
        RECORD.format(color="", step=2, time=9.4),
    )

    steps = reader_of("nemo_rl")(first + second).steps()

    assert steps.index.tolist() == [2] and steps["step_time_s"].tolist() == [9.4]


def test_an_infinite_rate_is_unknown() -> None:
    steps = reader_of("deepspeed_profile")(PROFILE.format(rate="inf")).steps()

    assert steps["step_time_s"].tolist() == pytest.approx([9.47754])
    assert np.isnan(steps["global_batch"]).all()
