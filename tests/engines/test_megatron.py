"""Megatron-LM's logs from 2021 to today: real ones read by eye, and every form of the line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.engines.log_reading.log_content import LogContent
from paceline.engines.megatron import LOG_FORMAT
from paceline.files.log_file import LogFile
from paceline.logs.parser import detect
from tests.engines.megatron_specs import MS, S, column, read, record
from tests.engines.promises import check_read

TERA = 1e12
MIB = 2**20


@pytest.fixture(scope="module")
def variants(reference_data: Path) -> list[bytes]:
    """The lines of a collection of records from ten programs."""
    return (reference_data / "logs" / "megatron_lm_variants.log").read_bytes().splitlines(True)


def real(folder: Path, name: str) -> LogContent:
    path = folder / "logs" / name
    assert detect(LogFile(path)) == "megatron"
    return check_read(LOG_FORMAT, path.read_bytes())


def test_a_log_of_core_0_8(reference_data: Path):
    content = (reference_data / "logs/megatron_lm_core0.8_gpt7b_8gpu.log").read_bytes()
    log = read(LOG_FORMAT, content)

    assert log.steps().index.tolist() == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert column(log, "step_time_s") == [
        13.0353, 12.1378, 12.0688, 12.0363, 12.0561, 12.0724, 12.0905, 12.0993, 12.0994, 12.1043
    ]  # fmt: skip
    assert column(log, "loss")[:3] == [None, 10.64275, 8.99542]
    assert column(log, "loss")[-1] == 5.847192
    assert column(log, "grad_norm")[:5] == [None, 47.021, 6.042, 5.818, 35.929]
    assert set(column(log, "global_batch")) == {1024}
    assert column(log, "flops_per_s_per_device")[0] == 812.5 * TERA
    assert column(log, "flops_per_s_per_device")[-1] == 875.0 * TERA
    assert log.resolution_s == pytest.approx(1e-4)
    assert log.memory_bytes == {"allocated": 75078.4326171875 * MIB, "reserved": 75682 * MIB}
    assert log.facts == {
        "total_steps": 500_000,
        "num_parameters": 6_436_700_000,
        "framework_version": "core 0.11 or older",
    }
    assert log.remarks == [
        "skipped steps (overflow), included in the printed times: 16",
    ]
    assert log.end_line is log.incomplete_reason is log.out_of_memory is None


def test_the_core_0_8_log_is_found_and_read_alike_in_pieces(reference_data: Path):
    assert len(real(reference_data, "megatron_lm_core0.8_gpt7b_8gpu.log")) == 10


def test_a_log_of_2021(reference_data: Path):
    log = real(reference_data, "bigscience_meg_gpt2_perf_n16.txt")

    assert log.steps().index.tolist() == [1, 2, 3]
    assert column(log, "step_time_s") == [155.4838, 129.0288, 128.8915]
    assert column(log, "loss") == [None, None, None]
    assert log.facts == {
        "global_batch": 1024,
        "micro_batch": 4,
        "tp": 4,
        "pp": 16,
        "total_steps": 1000,
    }
    assert log.remarks == ["skipped steps (overflow), included in the printed times: 3"]


def test_a_log_of_2021_without_consumed_samples(reference_data: Path):
    log = real(reference_data, "bigscience_meg_ds_zero_gpt2_perf_n16-1999616.txt")

    assert column(log, "step_time_s") == [123.7424, 128.917, 128.6427, 127.766]
    assert column(log, "loss") == [12.52221, 12.5177, 40.75232, 38.99556]
    assert log.memory_bytes == {"allocated": 26118.2294921875 * MIB, "reserved": 28560 * MIB}
    assert log.facts == {"tp": 4, "micro_batch": 48, "total_steps": 1000}


READ_BY_EYE: list[tuple[int, int, float, dict[str, float]]] = [
    (0, 200, 1.0826, {"loss": 8.440352, "global_batch": 16}),
    (1, 1, 201.2124, {"global_batch": 1024}),
    (3, 200, 0.43, {"loss": 7.399415, "grad_norm": 2.918, "global_batch": 4}),
    (5, 1, 271.607, {"flops_per_s_per_device": 40.4 * TERA, "loss": 11.92634, "grad_norm": 5.96}),
    (6, 4, 270.1254, {"flops_per_s_per_device": 449.6 * TERA, "samples_per_s": 3.8,
                      "loss": 2.12038, "grad_norm": 14.218}),
    (7, 300, 131.0641, {"flops_per_s_per_device": 412.3 * TERA, "grad_norm": 0.623,
                        "tokens_per_s_per_device": 8000.5, "loss": 1.50459}),
    (8, 10, 1.1476, {"global_batch": 16}),
    (9, 5, 15.8, {"flops_per_s_per_device": 490 * TERA, "loss": 13.4424, "global_batch": 2048}),
    (10, 1, 20.2891, {"loss": 12.58695, "grad_norm": 10.275, "global_batch": 128}),
    (14, 48, 7.1387, {"loss": 0.08317189, "grad_norm": 1.721, "global_batch": 64}),
    (16, 50, 9.089, {"loss": 8.114214, "grad_norm": 0.042, "global_batch": 512}),
]  # fmt: skip
"""Line of the collection, number, seconds, and what else it says."""


@pytest.mark.parametrize(("at", "number", "seconds", "values"), READ_BY_EYE)
def test_real_lines_of_many_programs(
    variants: list[bytes], at: int, number: int, seconds: float, values: dict[str, float]
):
    log = read(LOG_FORMAT, variants[at])

    assert log.steps().index.tolist() == [number]
    assert column(log, "step_time_s") == [seconds]
    assert {name: column(log, name) for name in values} == {n: [v] for n, v in values.items()}


def test_all_records_of_the_collection_are_read_and_nothing_else(variants: list[bytes]):
    read_lines = [at for at, line in enumerate(variants) if len(read(LOG_FORMAT, line))]

    assert read_lines == [at for at, *_ in READ_BY_EYE]


FORMS: list[tuple[dict[str, str | None], dict[str, float]]] = [
    ({}, {"step_time_s": 1.2505}),
    ({MS: None, S: "106.46"}, {"step_time_s": 106.46}),
    ({"throughput per GPU (TFLOP/s/GPU)": "877.5"}, {"flops_per_s_per_device": 877.5 * TERA}),
    ({"flop throughput (TFLOP/sec/GPU)": "877.5"}, {"flops_per_s_per_device": 877.5 * TERA}),
    ({"TFLOPs": "145.19"}, {"flops_per_s_per_device": 145.19 * TERA}),
    ({"approx flops per GPU": "38.5TFLOPS"}, {"flops_per_s_per_device": 38.5 * TERA}),
    ({"throughput per GPU (TFLOP/s/GPU)": "1290.3/1162.8 "},
     {"flops_per_s_per_device": 1290.3 * TERA}),
    ({"compute per GPU (TFLOP/s/GPU)": "615.5 (avg 614.2)", MS: "654.5/735.1"},
     {"flops_per_s_per_device": 615.5 * TERA, "step_time_s": 0.6545}),
    ({"tokens/s/GPU inst/harmonic mean": "25032.8/22288.1"}, {"tokens_per_s_per_device": 25032.8}),
    ({"tokens per GPU (tokens/s/GPU)": "9640.7"}, {"tokens_per_s_per_device": 9640.7}),
    ({"Tokens per second per GPU (Tok/s/GPU)": "2645.8"}, {"tokens_per_s_per_device": 2645.8}),
    ({"tokens/sec/gpu": "8000.5", "eta": "1 day, 2:03:04"}, {"tokens_per_s_per_device": 8000.5}),
    ({"iteration time": "270.125 s samples/sec: 3.8"}, {"samples_per_s": 3.8}),
    ({"lm loss": None, "lm_loss": "1.5E+00"}, {"loss": 1.5}),
    ({"lm loss": None, "loss": "1.5"}, {"loss": 1.5}),
    ({"load_balancing_loss": "1.04E+00", "mtp_1 loss": "3.5"}, {"loss": 8.99542}),
    ({"energy per GPU (J/iter/GPU)": "1992.5", "power per GPU (W/GPU)": "647.8"},
     {"step_time_s": 1.2505}),
    ({"skipped samples": "     12", "num zeros": "1174412544.0", "params norm": "7092.506"},
     {"grad_norm": 6.042}),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "values"), FORMS)
def test_every_form_of_a_field(changed: dict[str, str | None], values: dict[str, float]):
    log = check_read(LOG_FORMAT, record(1) + record(2, changed) + record(3))

    assert len(log) == 3
    assert {name: column(log, name)[1] for name in values} == values


def test_the_rate_in_front_of_a_record_gives_the_batch():
    """As GPT-NeoX prints it."""
    lines = b"".join(
        b" samples/sec: %.3f | iteration %8d/   10000 | elapsed time per iteration (ms): %.1f |"
        b" lm_loss: 1.1E+01 |\n" % (32 / seconds, number, 1000 * seconds)
        for number, seconds in enumerate((4.0, 3.9, 4.1), 10)
    )
    log = check_read(LOG_FORMAT, lines)
    assert column(log, "samples_per_s") == pytest.approx([8.0, 8.205, 7.805])
    assert column(log, "global_batch") == [32, 32, 32]


def test_a_rate_that_gives_no_whole_batch_gives_none():
    line = b" samples/sec: 8.100 | iteration 10/ 100 | elapsed time per iteration (ms): 4000.0 |\n"
    log = check_read(LOG_FORMAT, line)
    assert column(log, "samples_per_s") == pytest.approx([8.1])
    assert "global_batch" not in log.steps().columns


@pytest.mark.parametrize("unsound", ["8.0K", "1,444.5", "None", "", "1.2.3", "?"])
def test_a_value_that_is_no_plain_number_is_not_taken(unsound: str):
    log = read(LOG_FORMAT, record(1) + record(2, {"global batch size": unsound}) + record(3))

    assert column(log, "global_batch") == [128, None, 128]
    assert column(log, "loss") == [8.99542] * 3
    assert log.remarks == []


def test_fields_in_another_order_are_read_all_the_same():
    text = (
        b" iteration 1/ 9 | lm loss: 2.0 | elapsed time per iteration (ms): 5.0 "
        b"| grad norm: 3.0 |\n"
        b" iteration 2/ 9 | grad norm: 4.0 | lm loss: 1.0 "
        b"| elapsed time per iteration (ms): 6.0 |\n"
    )

    log = check_read(LOG_FORMAT, text)

    assert column(log, "step_time_s") == [0.005, 0.006]
    assert column(log, "loss") == [2, 1]
    assert column(log, "grad_norm") == [3, 4]


PREFIXES = (
    "[default7]:",
    "[lrdn3321:3]: ",
    "3: ",
    " 12: [2026-02-06 20:55:02.918469] ",
    "[rank0]:",
    "ml-512-node-001: ",
    "ain_fp8_mx/0  [2025-12-22 15:18:33] ",
    "pod-x-7 ",
    "\x1b[32mINFO\x1b[0m ",
    "[20260923 15:34:02][rank-7/8][DEBUG] [-utils.py:425] : [2026-09-23 15:34:04.269468] ",
)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\x1b[0m\n"], ids=["LF", "CRLF", "colour"])
def test_what_stands_before_a_record_does_not_matter(prefix: str, end: bytes):
    lines = [record(n, {"lm loss": f"{n}.5"}, prefix).replace(b"\n", end) for n in range(1, 6)]

    log = check_read(LOG_FORMAT, b"".join(lines))

    assert log.steps().index.tolist() == [1, 2, 3, 4, 5]
    assert column(log, "loss") == [1.5, 2.5, 3.5, 4.5, 5.5]
    assert column(log, "step_time_s") == [1.2505] * 5


@pytest.mark.parametrize("between", [b"", b" ", b"Deleting graphs", b"node-7: ", b"a: 1 |", b"7: "])
def test_records_that_share_a_line(between: bytes):
    log = check_read(LOG_FORMAT, between.join(record(n)[:-1] for n in range(1, 6)) + b"\n")

    assert log.steps().index.tolist() == [1, 2, 3, 4, 5]
    assert column(log, "grad_norm") == [6.042] * 5


def test_lines_of_others_between_records():
    others = (
        b"time (ms) | forward-compute: 53.79 | backward-compute: 138.84 | optimizer: 129.43\n"
        b"(min, max) time across ranks (ms):\n"
        b"    forward-backward ...............................: (1.25, 1.30)\n"
        b"validation loss at iteration 1000 | lm loss value: 1.2E+00 | lm loss PPL: 3.3E+00 |\n"
        b"  successfully saved checkpoint at iteration      50 to /x [ t 1/1, p 1/1 ]\n"
        b"(min, max) time across ranks (ms): save-checkpoint ...: (24895.07, 24895.13)\n"
        b"\xff\xfe\x00\x00 not text\n"
    )
    log = check_read(LOG_FORMAT, others.join(record(n) for n in range(1, 6)))

    assert log.steps().index.tolist() == [1, 2, 3, 4, 5]
    assert column(log, "loss") == [8.99542] * 5
    assert log.facts == {"total_steps": 500} and log.remarks == []


def test_lines_that_are_cut_off_keep_what_they_say_in_full():
    cut = re.sub(rb"rate: .*", b"", record(3))

    log = check_read(LOG_FORMAT, record(1) + record(2) + cut + record(4) + record(5))

    assert column(log, "step_time_s") == [1.2505] * 5
    assert column(log, "loss") == [8.99542, 8.99542, None, 8.99542, 8.99542]
    assert log.incomplete_reason is None


def test_a_number_that_is_cut_in_two_is_not_taken():
    text = record(2)
    log = read(LOG_FORMAT, record(1) + text[: text.index(b"8.995") + 3])

    assert column(log, "step_time_s") == [1.2505, 1.2505]
    assert column(log, "loss") == [8.99542, None]
    assert log.incomplete_reason == "the log ends within iteration 2"


def test_a_record_without_a_time_is_no_step():
    log = read(LOG_FORMAT, record(1) + record(2)[:60] + b"\n" + record(3))

    assert log.steps().index.tolist() == [1, 3]
    assert log.remarks == ["iteration lines without a step time, ignored: 1"]


def test_skipped_steps_are_told_and_their_overflow_is_no_fault():
    skipped: dict[str, str | None] = {
        "lm loss": None,
        "grad norm": "inf",
        "number of skipped iterations": "  3",
    }
    log = read(LOG_FORMAT, record(1) + record(2, skipped) + record(3))

    assert column(log, "loss") == [8.99542, None, 8.99542]
    assert column(log, "grad_norm") == [6.042, None, 6.042]
    assert log.remarks == ["skipped steps (overflow), included in the printed times: 3"]


def test_a_nan_is_told_as_infinity():
    log = read(LOG_FORMAT, record(1) + record(2, {"lm loss": "nan", "grad norm": "nan"}))

    assert column(log, "loss") == [8.99542, float("inf")]
    assert column(log, "grad_norm") == [6.042, float("inf")]


def test_an_interval_of_nan_losses_only_has_an_infinite_loss():
    nan: dict[str, str | None] = {
        "lm loss": None,
        "number of skipped iterations": "  2",
        "number of nan iterations": "  2",
    }
    some = nan | {"lm loss": "2.0"}
    log = read(LOG_FORMAT, record(1, nan) + record(2, some))

    assert column(log, "loss") == [float("inf"), 2]
    assert "skipped steps with a NaN loss: 4" in log.remarks


def test_numbers_beyond_all_sense_do_no_harm():
    odd: dict[str, str | None] = {
        "number of skipped iterations": "1e999",
        "number of nan iterations": "nan",
        "grad norm": "1e999",
        "global batch size": "-1e308",
        MS: "1e400",
    }
    assert len(check_read(LOG_FORMAT, record(1) + record(2, odd) + record(10**17))) == 3


def test_a_million_bytes_without_a_line_end_before_a_record():
    log = read(LOG_FORMAT, b"x" * (1 << 20) + record(1), b"\n" * 5 + record(2))

    assert log.steps().index.tolist() == [1, 2]


def test_power_is_averaged_over_the_lines():
    log = read(
        LOG_FORMAT,
        record(1, {"power per GPU (W/GPU)": "600.0"}),
        record(2, {"power per GPU (W/GPU)": "650.0"}),
        record(3),
    )

    assert log.figures == {"power_w_per_device": 625}


@pytest.mark.parametrize(
    ("day", "version"),
    [("2025-03-05", "core 0.11 or older"), ("2025-03-06", None), ("2026-01-01", None)],
)
def test_a_log_from_before_causal_counting_says_so(day: str, version: str | None):
    log = read(LOG_FORMAT, record(1, before=f" [{day} 15:58:56] "))

    assert log.facts.get("framework_version") == version


def test_more_fields_than_are_learnt():
    many: dict[str, str | None] = {f"field {n}": "1.0" for n in range(100)}
    content = record(1, many) + record(2, {**many, "TFLOPs": "5.0"})

    log = read(LOG_FORMAT, content)

    assert column(log, "step_time_s") == [1.2505, 1.2505]
    assert column(log, "loss") == [8.99542, 8.99542]


def test_what_is_no_step_line_is_not_taken_for_one():
    lines: list[Any] = [
        b"saving checkpoint at iteration 5 | consumed samples: 3",
        b"iteration 5 / x | consumed samples: 3 |",
        b"Step Time : 5.69s GPU utilization: 1185.6MODEL_TFLOP/s/GPU",
        b"Training epoch 0, iteration 45/99 | lr: 6.897e-06 | global_batch_size: 128 |",
    ]
    assert not any(LOG_FORMAT.step_line.search(line) for line in lines)
    assert LOG_FORMAT.step_line.search(record(1))


@pytest.mark.parametrize(("schedule", "batch"), [("None", 2), ("0:4 2048:8 4096:16", None)])
def test_the_batch_of_the_arguments_is_none_where_it_grows(schedule: str, batch: int | None):
    arguments = f"  global_batch_size ..... 2\n  step_batch_size_schedule ..... {schedule}\n"
    assert read(LOG_FORMAT, arguments.encode() + record(1)).facts.get("global_batch") == batch
