"""Megatron-Bridge's logs: two ranks write one step, and the two lines find each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.engines.megatron_bridge import LOG_FORMAT
from paceline.files.log_file import LogFile
from paceline.logs.parser import detect
from tests.engines.megatron_specs import column, read, records
from tests.engines.promises import check_read

TERA = 1e12
GB = 10**9


@pytest.fixture(scope="module")
def real(reference_data: Path) -> bytes:
    path = reference_data / "logs" / "megatron_bridge_llama3_8b_bf16_b200_8gpu.log"
    assert detect(LogFile(path)) == "megatron_bridge"
    return path.read_bytes()


def test_a_log_of_llama3_8b_on_8_b200(real: bytes):
    log = read(LOG_FORMAT, real)

    assert log.steps().index.tolist() == list(range(1, 51))
    assert column(log, "step_time_s")[:4] == [43.8246, 5.737, 5.6653, 7.4138]
    assert column(log, "step_time_s")[-1] == 5.6986
    assert [v / TERA for v in column(log, "flops_per_s_per_device")[:6] if v] == pytest.approx(
        [153.9, 1175.9, 1190.8, 910.0, 1191.3, 1193.3]
    )
    assert column(log, "flops_per_s_per_device")[-1] == pytest.approx(1183.9 * TERA)
    assert column(log, "loss")[0] == 12.58172 and column(log, "loss")[-1] == 0.009380409
    assert column(log, "grad_norm")[0] == 10.276 and column(log, "grad_norm")[-1] == 0.046
    assert set(column(log, "global_batch")) == {128}
    assert log.memory_bytes == {"allocated": 116.45 * GB, "reserved": 127.05 * GB}
    assert log.facts == {"total_steps": 50, "num_parameters": 8_030_500_000}
    assert log.end_line == "[after training is done] datetime: 2026-03-27 23:13:36"
    assert log.remarks == []


def test_the_window_that_nvidia_takes_gives_nvidias_figures(real: bytes):
    steps = read(LOG_FORMAT, real).steps()
    window = (steps.index >= 35) & (steps.index <= 44)
    times, flops = (steps[name][window] for name in ("step_time_s", "flops_per_s_per_device"))

    assert times.mean() == pytest.approx(5.70788, abs=5e-6)
    assert times.std(ddof=1) == pytest.approx(0.01326, abs=5e-6)
    assert flops.mean() / TERA == pytest.approx(1181.93, abs=5e-3)
    assert flops.std(ddof=1) / TERA == pytest.approx(2.779, abs=5e-3)


def test_the_real_log_is_read_alike_in_pieces(real: bytes):
    assert len(check_read(LOG_FORMAT, real)) == 50


def without(text: bytes, line_with: bytes) -> bytes:
    """`text` without the one line that has these bytes."""
    return b"".join(line for line in text.splitlines(keepends=True) if line_with not in line)


def test_one_lost_line_of_rank_0_does_not_shift_the_others(real: bytes):
    all_flops = read(LOG_FORMAT, real).steps()["flops_per_s_per_device"]

    log = read(LOG_FORMAT, without(real, b"1193.3MODEL"))

    flops = log.steps()["flops_per_s_per_device"]
    assert len(flops) == 50 and np.isnan(flops).sum() == 1
    finite = np.isfinite(flops)
    np.testing.assert_allclose(flops[finite], all_flops[finite], rtol=2e-3)
    assert (flops[9:] == all_flops[9:]).all()
    assert log.remarks == ["iteration lines without a Step Time line: 1"]


def test_one_lost_line_of_the_last_rank_does_not_shift_the_others(real: bytes):
    all_flops = read(LOG_FORMAT, real).steps()["flops_per_s_per_device"]

    log = read(LOG_FORMAT, without(real, b"iteration       17/"))

    flops = log.steps()["flops_per_s_per_device"]
    np.testing.assert_allclose(flops, np.delete(all_flops, 16), rtol=2e-3)
    assert (flops[20:] == all_flops[21:]).all()
    assert log.remarks == ["Step Time lines without an iteration line, ignored: 1"]


def test_the_old_spelling_and_a_prefix(reference_data: Path):
    lines = (reference_data / "logs/megatron_lm_variants.log").read_bytes().splitlines(True)

    log = check_read(LOG_FORMAT, b"".join(lines[13:17]))

    assert log.steps().index.tolist() == [48, 50]
    assert column(log, "step_time_s") == [7.1387, 9.089]
    assert column(log, "flops_per_s_per_device") == [1031 * TERA, 663.5 * TERA]


def test_a_log_of_step_times_alone_is_counted_from_1(reference_data: Path):
    lines = (reference_data / "logs/megatron_lm_variants.log").read_bytes().splitlines(True)

    log = read(LOG_FORMAT, b"".join(lines[17:]))

    assert log.steps().index.tolist() == list(range(1, 9))
    assert column(log, "step_time_s") == [125.37, 6.13, 4.66, 10.69, 2.26, 3.54, 2.24, 2.22]
    assert column(log, "flops_per_s_per_device")[:2] == [20.9 * TERA, 426.6 * TERA]
    assert log.resolution_s == pytest.approx(0.01)
    assert log.remarks == ["Step Time lines have no step numbers: steps are counted from 1"]


def test_a_collection_with_records_of_other_programs(reference_data: Path):
    content = (reference_data / "logs/megatron_lm_variants.log").read_bytes()
    check_read(LOG_FORMAT, content)

    log = read(LOG_FORMAT, content)

    assert len(log) == 11
    assert log.remarks == [
        "skipped steps (overflow), included in the printed times: 11",
        "Step Time lines without an iteration line, ignored: 8",
        "iteration lines without a Step Time line: 9",
    ]


def test_a_line_of_rank_0_in_the_middle_of_a_record():
    line = b"Step Time : 1.25s GPU utilization: 900.0MODEL_TFLOP/s/GPU"
    record = records([1250.5])
    cut = record.index(b"rate: 2")

    log = check_read(LOG_FORMAT, record[:cut] + line + b"\n" + record[cut:] + b"\n")

    assert column(log, "step_time_s") == [1.2505]
    assert column(log, "flops_per_s_per_device") == [900 * TERA]
    assert column(log, "loss") == [8.99542]


def test_the_throughput_of_the_record_itself_goes_first():
    record = records([1250.5]).replace(
        b"| learning", b"| throughput per GPU (TFLOP/s/GPU): 7.0 | learning"
    )
    line = b"Step Time : 1.25s GPU utilization: 900.0MODEL_TFLOP/s/GPU\n"

    assert column(read(LOG_FORMAT, line + record), "flops_per_s_per_device") == [7 * TERA]


def test_a_utilization_of_0_is_no_measurement():
    line = b"Step Time : 1.25s GPU utilization: 0.0MODEL_TFLOP/s/GPU\n"

    log = read(LOG_FORMAT, line + records([1250.5]))

    assert column(log, "flops_per_s_per_device") == [None]
    assert log.remarks == ["a printed GPU utilization of 0.0 is not a measurement and is ignored"]


def test_many_lost_lines_on_both_sides_leave_the_others_with_their_own():
    draw = np.random.default_rng(1)
    times = 5.7 * (1 + 0.01 * draw.standard_normal(500))
    text, kept = b"", []
    for number, seconds in enumerate(times, 1):
        if draw.random() > 0.05:
            line = f"Step Time : {seconds:.2f}s GPU utilization: {6746 / seconds:.1f}"
            text += line.encode() + b"MODEL_TFLOP/s/GPU\n"
        if draw.random() > 0.05:
            text += records([1000 * seconds], number)
            kept.append(number - 1)

    flops = check_read(LOG_FORMAT, text).steps()["flops_per_s_per_device"]

    finite = np.isfinite(flops)
    assert len(flops) == len(kept) and finite.mean() > 0.85
    np.testing.assert_allclose((flops * times[kept])[finite] / TERA, 6746, rtol=3e-3)
