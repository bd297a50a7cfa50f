"""Megatron-DeepSpeed's logs: BigScience's own, read by eye, and what its followers print."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engines import megatron
from paceline.engines.log_reading.log_content import LogContent
from paceline.engines.megatron_deepspeed import LOG_FORMAT
from paceline.files.log_file import LogFile
from paceline.logs.facts import UserSettings
from paceline.logs.parser import detect, parse_log
from tests.engines.megatron_specs import MS, S, column, read, record
from tests.engines.promises import check_read

TERA = 1e12
MIB = 2**20


def real(folder: Path, name: str) -> LogContent:
    path = folder / "logs" / name
    assert detect(LogFile(path)) == "megatron_deepspeed"
    check_read(LOG_FORMAT, path.read_bytes())
    return read(LOG_FORMAT, path.read_bytes())


def test_the_176b_log(reference_data: Path):
    log = real(reference_data, "bigscience_tr11-176B_chronicles.txt")

    assert log.steps().index.tolist() == [
        *range(31214, 31223),
        31250,
        31251,
        *range(42780, 42785),
        45000,
    ]
    assert column(log, "step_time_s") == [
        106.46, 105.9, 106.4, 106.33, 107.53, 106.36, 106.3, 106.13, 106.44, 106.09, 106.13,
        105.16, 105.17, 106.25, 110.17, 111.14, 111.0,
    ]  # fmt: skip
    assert column(log, "samples_per_s")[0] == 19.238
    assert column(log, "flops_per_s_per_device")[0] == 147.29 * TERA
    assert column(log, "loss")[5] == 5.098124 and column(log, "grad_norm")[5] == 960.351
    assert column(log, "samples_per_s")[-1] == 18.451
    assert column(log, "flops_per_s_per_device")[-1] == 141.26 * TERA
    assert column(log, "loss")[-1] == 2.113567 and column(log, "grad_norm")[-1] == 0.139
    assert set(column(log, "global_batch")) == {2048, None}
    assert log.facts == {"total_steps": 115_311, "seq_len": 2048}
    assert log.resolution_s == pytest.approx(0.01)
    assert log.remarks == [] and log.incomplete_reason is None


def test_its_lines_that_are_cut_after_the_time_keep_the_time(reference_data: Path):
    log = real(reference_data, "bigscience_tr11-176B_chronicles.txt")

    assert column(log, "loss")[11:16] == [None] * 5
    assert column(log, "samples_per_s")[11:16] == [None] * 5


def test_the_104b_log_in_milliseconds(reference_data: Path):
    log = real(reference_data, "bigscience_tr8b-104B.txt")

    assert log.steps().index.tolist() == [
        6502, 6503, 6504, 12000, 12001, 13251, 14000, 16800, 16801, *range(17060, 17069)
    ]  # fmt: skip
    assert column(log, "step_time_s")[:8] == [
        31.0741, 31.0658, 31.0734, 207.9675, 279.2066, 220.6319, 255.4533, 384.5058
    ]  # fmt: skip
    assert column(log, "step_time_s")[-1] == 422.7524
    assert column(log, "global_batch")[:7] == [80, 80, 80, 528, 528, None, 1024]
    assert column(log, "loss")[0] == 3.876781 and column(log, "loss")[-1] == 4.137348
    assert column(log, "grad_norm")[0] == 3246.595
    assert log.facts == {"total_steps": 159_576, "seq_len": 2048}


def test_samples_per_second_that_were_divided_by_milliseconds_stay_as_printed(reference_data: Path):
    log = real(reference_data, "bigscience_tr8b-104B.txt")

    assert column(log, "samples_per_s")[6:10] == [None, 0.005, 0.005, 0.004]
    assert column(log, "flops_per_s_per_device")[6:9] == [None, 35.24 * TERA, 33.85 * TERA]


def test_a_log_of_2021_that_writes_lm_loss_with_a_dash(reference_data: Path):
    log = real(reference_data, "bigscience_meg_ds_3d_gpt2_perf_n16-ds-on.txt")

    assert log.steps().index.tolist() == list(range(1, 50))
    assert column(log, "step_time_s")[:3] == [159.7789, 141.0968, 137.1384]
    assert column(log, "step_time_s")[39] == 125.6433
    assert column(log, "step_time_s")[-1] == 136.3288
    assert column(log, "loss")[:2] == [12.44238, 12.44502]
    assert column(log, "loss")[-1] == 7.747273
    assert set(column(log, "grad_norm")) == {0}
    assert log.memory_bytes == {"allocated": 19961.072265625 * MIB, "reserved": 23288 * MIB}
    assert log.facts == {
        "global_batch": 1024,
        "micro_batch": 4,
        "tp": 4,
        "pp": 16,
        "total_steps": 1000,
    }


OWN: dict[str, str | None] = {
    MS: None,
    S: "215.99",
    "num zeros": "0.0",
    "samples per second": "9.482",
    "TFLOPs": "145.19",
}


def test_fields_of_the_followers():
    changed = OWN | {
        "actual seqlen": " 4096",
        "tokens per gpu per second (tgs)": "1146.733",
        "lm loss": None,
    }
    log = check_read(LOG_FORMAT, record(1, changed) + record(2, changed))

    assert column(log, "seq_len") == [4096, 4096]
    assert column(log, "tokens_per_s_per_device") == [1146.733] * 2
    assert column(log, "samples_per_s") == [9.482] * 2
    assert column(log, "step_time_s") == [215.99] * 2
    assert column(log, "loss") == [None, None]


def totals(samples: int, tokens: int) -> dict[str, str | None]:
    return OWN | {"consumed samples": str(samples), "consumed tokens": str(tokens)}


def test_the_sequence_length_follows_from_the_totals():
    log = read(LOG_FORMAT, record(1, totals(512, 1_048_576)), record(2, totals(1024, 2_097_152)))

    assert log.facts["seq_len"] == 2048


def test_a_growing_sequence_length_is_not_stated_as_one():
    log = read(LOG_FORMAT, record(1, totals(512, 32_768)), record(2, totals(1024, 102_400)))

    assert "seq_len" not in log.facts


@pytest.mark.parametrize(
    "changed",
    [
        {MS: None, S: "106.46"},
        {"lm loss": None, "lm-loss": "1.0"},
        {"samples per second": "0.005"},
        {"consumed tokens": "  364398870528"},
    ],
)
def test_it_is_told_from_megatron_by_its_own_fields(changed: dict[str, str | None]):
    assert LOG_FORMAT.step_line.search(record(1, changed))
    assert LOG_FORMAT.precedence < megatron.LOG_FORMAT.precedence


@pytest.mark.parametrize(
    "changed",
    [{}, {"consumed tokens": "1.258B"}, {"iteration time": "270.125 s samples/sec: 3.8"}],
)
def test_records_of_megatron_are_not_taken_for_its_own(changed: dict[str, str | None]):
    assert not LOG_FORMAT.step_line.search(record(1, changed))


def keyed(step: int, time_ms: float, average: float = 0.0) -> str:
    """A step as printed by Argonne's fork, with DeepSpeed's timer."""
    timer = (
        f"[2024-04-21 02:45:24,651] [INFO] [timer.py:260:stop] epoch=0/micro_step={step}/"
        f"global_step={step}, RunningAvgSamplesPerSec={average}, CurrSamplesPerSec={average}, "
        "MemAllocated=4.75GB, MaxMemAllocated=13.7GB\n"
    )
    return (timer if average else "") + (
        f"[2024-09-16 22:59:19.28][INFO][training_log:661] -  iteration={step:8d}/  635782 | "
        f"consumed_samples={768 * step:12d} | consumed_tokens={768 * 4096 * step:12d} | "
        f"elapsed_time_per_iteration_ms={time_ms:.1f} | learning_rate=9.4372e-09 | "
        "global_batch_size=  768 | lm loss=11.167250 | loss_scale=1.0 | grad_norm=6.363 | "
        "actual_seqlen= 4096 | number_of_skipped_iterations=  0 | number_of_nan_iterations=  0 | "
        f"samples_per_second={768e3 / time_ms:.3f} | tokens_per_gpu_per_second_tgs=4432.597 | "
        "[LM]TFLOPs=20.30 | [DS]TFLOPs=26.18 |\n"
    )


def test_a_fork_that_writes_keys_and_values():
    log = check_read(LOG_FORMAT, "".join(keyed(n, 3400.2 + n) for n in range(1, 30)).encode())

    assert log.steps().index.tolist() == list(range(1, 30))
    assert column(log, "step_time_s")[:2] == [3.4012, 3.4022]
    assert set(column(log, "global_batch")) == {768} and set(column(log, "seq_len")) == {4096}
    assert column(log, "loss")[0] == 11.16725 and column(log, "grad_norm")[0] == 6.363
    assert column(log, "samples_per_s")[0] == 225.803
    assert column(log, "tokens_per_s_per_device")[0] == 4432.597
    assert column(log, "flops_per_s_per_device")[0] == 26.18 * TERA
    assert log.facts["total_steps"] == 635_782 and log.facts["seq_len"] == 4096


def test_lines_that_time_steps_win_over_a_running_average_that_is_named(tmp_path: Path):
    path = tmp_path / "train.log"
    path.write_text("".join(keyed(n, 3420.2, average=321.1) for n in range(1, 30)))
    document = parse_log(path, UserSettings()).document

    assert document.engine == "megatron_deepspeed"
    assert document.samples_per_s == pytest.approx(768 / 3.4202)
    (other,) = document.disagreements
    assert (other.figure, other.printed) == ("running_samples_per_s", 321.1)
    assert "running average" in other.cause
