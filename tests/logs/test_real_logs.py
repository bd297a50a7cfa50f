"""Public logs parse to what a reader finds in them by eye: steps, window, times, printed figures.

Medians and means of a window are those of the step times in the file at these step numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.core.units import GIB, MIB
from paceline.core.window import MIN_STEADY
from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import ParsedLog
from paceline.logs.parser import Parsing, log_files, parse_log

LLAMA = UserSettings(
    model="llama31-8b",
    device="B200",
    num_devices=8,
    seq_len=8192,
    dtype="bf16",
    convention="causal",
    total_tokens=1e12,
)


@dataclass(frozen=True)
class Read:
    """Content of a log."""

    engine: str
    n_steps: int
    rule: str = "auto"
    steps: tuple[int, int, int] | None = None
    """First and last step number of the window, and how many lines it has."""
    median_s: float | None = None
    mean_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    reported: dict[str, float] = field(default_factory=dict[str, float])
    disagreements: dict[str, str] = field(default_factory=dict[str, str])
    """Figure and a part of the cause."""


AVERAGE = {"running_samples_per_s": "running average"}

LOGS = {
    "bigscience_hf_ds_gpt2_perf_n16_bs4-mbs8.txt": Read(
        "hf_trainer", 0, "as printed", samples_per_s=3.663,
        reported={"samples_per_s": 3.663, "run_time_s": 273.0149},
    ),
    "bigscience_meg_ds_3d_gpt2_perf_n16-ds-on.txt": Read(
        # It goes on getting faster for half of its steps: a long warm-up.
        "megatron_deepspeed", 49, "auto", (25, 49, 25), 135.6192, 135.101928,
        samples_per_s=1024 / 135.6192,
        reported={
            "memory_allocated_bytes": 19961.072265625 * MIB,
            "memory_reserved_bytes": 23288 * MIB,
        },
    ),
    "bigscience_meg_ds_zero_gpt2_perf_n16-1999616.txt": Read(
        "megatron", 4, "auto", (2, 4, 3), 128.6427, 128.4419,
        reported={
            "memory_allocated_bytes": 26118.2294921875 * MIB,
            "memory_reserved_bytes": 28560 * MIB,
        },
    ),
    "bigscience_meg_gpt2_perf_n16.txt": Read(
        "megatron", 3, "auto", (2, 3, 2), 128.96015, 128.96015, samples_per_s=1024 / 128.96015
    ),
    "bigscience_tr11-176B_chronicles.txt": Read(
        "megatron_deepspeed", 17, "auto", (31214, 31251, 11), 106.33, 106.37,
        2048 / 106.33, 2048 * 2048 / 106.33,
        {"samples_per_s": 19.26, "tflops_per_device": 147.46},
    ),
    "bigscience_tr8b-104B.txt": Read(
        "megatron_deepspeed", 18, "auto", (17061, 17068, 8), 422.93715, 422.9347875,
        2048 / 422.93715, 2048 * 2048 / 422.93715,
        {"samples_per_s": 0.005, "tflops_per_device": 32.035},
        {"samples_per_s": "milliseconds"},
    ),
    "lambda_1cc-64xN_1node_1xN_opt-13b_bs16_zero0_opt-13b_1_1xN_batch0001.log": Read(
        "deepspeed_chat", 11, "as printed", None, 128 / 72.9532, 128 / 72.9532,
        72.9532, 72.9532 * 512,
        {"samples_per_s": 72.9532, "run_time_s": 175.4549, "timed_steps": 100,
         "memory_allocated_bytes": 40.72 * GIB},
    ),
    "lambda_1cc-64xN_1node_1xN_opt-350m_bs24_zero0_opt-350m_1_1xN_batch0001.log": Read(
        "deepspeed_chat", 11, "as printed", None, 192 / 943.455, 192 / 943.455,
        943.455, 943.455 * 512,
        {"run_time_s": 20.3507, "memory_allocated_bytes": 33.78 * GIB}, AVERAGE,
    ),
    "lambda_1cc-64xN_allnodes_2xN_opt-350m_bs24_zero0_opt-350m_1_2xN_batch0001.log": Read(
        "deepspeed_chat", 11, "as printed", None, 384 / 1874.1065, 384 / 1874.1065,
        1874.1065, 1874.1065 * 512,
        {"run_time_s": 20.4898, "timed_steps": 100}, AVERAGE,
    ),
    "lambda_batch1_opt-13b_step3_1xN_batch1.log": Read(
        "deepspeed_chat", 9, "as printed", None, 128 / 9.8183, 128 / 9.8183,
        9.8183, 9.8183 * 512,
        {"run_time_s": 130.3683, "timed_steps": 10, "memory_allocated_bytes": 35.63 * GIB},
    ),
    "megatron_bridge_llama3_8b_bf16_b200_8gpu.log": Read(
        "megatron_bridge", 50, "auto", (14, 50, 37), 5.701, 5.69927027, 128 / 5.701, None,
        {"tflops_per_device": 1183.4, "memory_allocated_bytes": 116.45e9,
         "memory_reserved_bytes": 127.05e9},
    ),
    "megatron_lm_core0.8_gpt7b_8gpu.log": Read(
        "megatron", 10, "auto", (70, 100, 4), 12.09935, 12.098375, 1024 / 12.09935, None,
        {"tflops_per_device": 875.3, "memory_allocated_bytes": 75078.4326171875 * MIB},
    ),
    "megatron_lm_variants.log": Read(
        "megatron_bridge", 11, "auto", (1, 300, 3), 270.1254, 224.2655, 1024 / 270.1254, None,
        {"tflops_per_device": 412.3, "samples_per_s": 3.8},
    ),
    "nemo1_progressbar_variants.log": Read(
        # Eleven runs in one file, of different batches.
        "nemo1", 11, "auto", (6023, 6023, 1), 2.59, 2.59,
    ),
    "nemo2_llama3_8b_bf16_b200_8gpu.log": Read(
        "nemo2", 5, "auto", (45, 49, 5), 6.071, 6.0708, 128 / 6.071, None,
        {"tflops_per_device": 1250, "memory_allocated_bytes": 115792977920},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_a_log_says_what_a_reader_finds_in_it(reference_data: Path, name: str):
    expected = LOGS[name]
    log = parse_log(reference_data / "logs" / name, UserSettings()).document

    assert (log.engine, log.status, log.n_steps) == (expected.engine, "ok", expected.n_steps)
    assert log.window is not None and log.window.rule == expected.rule
    if expected.steps:
        assert (log.window.first_step, log.window.last_step, log.window.n) == expected.steps
        few = any(warning.startswith("few-steps") for warning in log.warnings)
        assert few == (expected.steps[2] < MIN_STEADY)
    times = log.step_time_s
    median_and_mean = (times.median, times.mean) if times else (None, None)
    assert median_and_mean == (near(expected.median_s), near(expected.mean_s))
    assert log.samples_per_s == near(expected.samples_per_s)
    assert log.tokens_per_s == near(expected.tokens_per_s)
    assert {name: log.reported.get(name) for name in expected.reported} == {
        name: near(value) for name, value in expected.reported.items()
    }
    assert {d.figure for d in log.disagreements} == set(expected.disagreements)
    assert all(expected.disagreements[d.figure] in d.cause for d in log.disagreements)


def near(value: float | None) -> object:
    return None if value is None else pytest.approx(value, rel=1e-6)


def test_every_log_is_expected_here(reference_data: Path):
    """One of them times collectives and is not a training log."""
    others = [path for path in log_files([reference_data / "logs"]) if path.name not in LOGS]
    assert [path.name for path in others] == ["bigscience_all_reduce_n16_32gb.txt"]
    assert parse_log(others[0], UserSettings()).document.status == "not-a-training-log"


def test_the_window_that_nvidia_takes_gives_the_figures_that_nvidia_expects(bridge: Path):
    log = parse_log(bridge, UserSettings(window="35:44"))
    assert log.document.step_time_s is not None and log.document.step_time_s.n == 10
    assert log.document.step_time_s.mean == pytest.approx(5.70788)
    assert printed_tflops(log, 35, 44) == pytest.approx(1181.93)


def test_what_is_added_gives_the_rate_that_the_log_prints(bridge: Path):
    """The step time and the printed TFLOP/s are both of this file: they must fit each other."""
    log = parse_log(bridge, LLAMA).document
    rate = figure(log, "model_flops_per_s_per_device")
    assert rate == pytest.approx(1183.4e12, rel=0.001) and log.disagreements == ()
    assert figure(log, "mfu") == pytest.approx(1183.4 / 2250, rel=0.001)
    assert log.tokens_per_s == pytest.approx(128 * 8192 / 5.701)
    paid = 1e12 / (128 * 8192 / 5.69927027) / 86400
    assert figure(log, "days_to_train") == pytest.approx(paid)


def test_nemo_2_counts_attention_in_full(reference_data: Path):
    path = reference_data / "logs" / "nemo2_llama3_8b_bf16_b200_8gpu.log"
    (disagreement,) = parse_log(path, LLAMA).document.disagreements
    assert disagreement.figure == "tflops_per_device"
    assert disagreement.ratio == pytest.approx(1.125, rel=0.003)
    assert "full-attention" in disagreement.cause


@pytest.fixture
def bridge(reference_data: Path) -> Path:
    return reference_data / "logs" / "megatron_bridge_llama3_8b_bf16_b200_8gpu.log"


def figure(log: ParsedLog, name: str) -> float | None:
    return log.metrics[name].value


def printed_tflops(log: Parsing, first: int, last: int) -> float:
    """The mean of what the lines of these steps print."""
    rows = (log.steps.index >= first) & (log.steps.index <= last)
    return float(log.steps["flops_per_s_per_device"][rows].mean()) / 1e12
