"""torchtitan's lines, current and older, plain and coloured."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.units import GIB
from paceline.engines.torchtitan import LOG_FORMAT
from tests.engines.promises import reader_of

COLOURS = ("\x1b[31m", "\x1b[32m", "\x1b[38;2;180;60;0m", "\x1b[36m", "\x1b[34m", "\x1b[35m")
LOGGER = "[rank0]:[titan] 2025-06-01 05:16:30,329 - root - INFO - "


def line(step: int, rate: str = "1,444", colours: tuple[str, ...] = ("",) * 6) -> str:
    a, b, c, d, e, f = colours
    return (
        f"{LOGGER}{a}step: {step:2}  {b}loss: {8 - step / 100:7.4f}  {c}grad_norm:  1.4604  "
        f"{d}memory: 60.00GiB(75.00%)  {e}tps: {rate}  {d}tflops: 300.32  {f}mfu: 23.10%"
        f"{colours[0] and chr(27) + '[0m'}\n"
    )


check = reader_of("torchtitan")


@pytest.mark.parametrize("colours", [("",) * 6, COLOURS], ids=["plain", "coloured"])
def test_the_current_line(colours: tuple[str, ...]):
    text = "".join(line(step, colours=colours) for step in (1, 10, 20, 30))
    assert LOG_FORMAT.step_line.search(text.encode())
    log = check(text)
    steps = log.steps()
    assert steps.index.tolist() == [1, 10, 20, 30]
    assert steps["loss"] == pytest.approx([7.99, 7.9, 7.8, 7.7])
    assert steps["grad_norm"] == pytest.approx([1.4604] * 4)
    assert steps["tokens_per_s_per_device"].tolist() == [1444.0] * 4
    assert steps["flops_per_s_per_device"] == pytest.approx([300.32e12] * 4)
    assert steps["mfu"] == pytest.approx([0.231] * 4)
    assert steps["reserved_bytes"] == pytest.approx([60 * GIB] * 4)
    assert not steps.known("step_time_s")


def test_a_step_without_memory_is_unknown_whatever_block_it_came_in():
    none = line(2).replace("memory: 60.00GiB", "memory:  0.00GiB")
    reserved = check(line(1) + none + line(3)).steps()["reserved_bytes"]
    assert reserved == pytest.approx([60 * GIB, np.nan, 60 * GIB], nan_ok=True)


def test_rates_of_a_million_have_two_commas():
    assert check(line(10, "1,234,567")).steps()["tokens_per_s_per_device"].tolist() == [1_234_567.0]


def test_the_line_of_2024_counts_words():
    text = f"{LOGGER}step: 10  loss:  7.5000  memory:  0.69GiB(0.72%)  wps: 3,279  mfu: 0.25%\n"
    assert LOG_FORMAT.step_line.search(text.encode())
    steps = check(text).steps()
    assert steps["tokens_per_s_per_device"].tolist() == [3279.0]
    assert steps["mfu"] == pytest.approx([0.0025])
    assert not steps.known("flops_per_s_per_device")


def test_the_first_lines_of_all_had_the_time_itself():
    text = f"{LOGGER}step: 10  loss: 10.8812  iter:  1.3287  data: 0.0438  lr: 0.00026667\n"
    assert LOG_FORMAT.step_line.search(text.encode())
    log = check(text)
    assert log.steps()["step_time_s"].tolist() == [1.3287]
    assert log.resolution_s == pytest.approx(1e-4)


@pytest.mark.parametrize(
    "text",
    [
        "[I][mmm/train:458] step=20 global_avg_loss=12.269 global_max_loss=12.31 "
        "throughput(tps)=86.02 mfu(%)=1.33 end_to_end(s)=2.380844 data_loading(s)=0.9\n",
        '{"step": 20, "loss_metrics/global_avg_loss": 12.269, "throughput(tps)": 86.02, '
        '"mfu(%)": 1.33, "time_metrics/end_to_end(s)": 2.380844, '
        '"memory/max_reserved(GiB)": 2.5}\n',
    ],
    ids=["pairs", "JSON"],
)
def test_metrics_by_their_own_names_have_the_time(text: str):
    assert LOG_FORMAT.step_line.search(text.encode())
    log = check(text)
    steps = log.steps()
    assert steps.index.tolist() == [20]
    assert steps["step_time_s"].tolist() == [2.380844]
    assert steps["loss"] == pytest.approx([12.269])
    assert steps["tokens_per_s_per_device"] == pytest.approx([86.02])
    assert steps["mfu"] == pytest.approx([0.0133])
    assert log.resolution_s == pytest.approx(1e-6)


def test_validation_is_no_training_step():
    validation = (
        f"{LOGGER}validate step: 10  loss:  7.7082  memory:  1.34GiB(0.96%)  tps: 301,092\n"
    )
    steps = check(line(10) + validation + line(20)).steps()
    assert steps.index.tolist() == [10, 20]
    assert steps["tokens_per_s_per_device"].tolist() == [1444.0, 1444.0]


def test_fields_that_came_later_stand_between_without_harm():
    text = line(5).replace("memory:", "aux_loss:  0.1000  lr: 1e-4  mmemory:")
    steps = check(text).steps()
    assert steps["loss"] == pytest.approx([7.95])
    assert steps["reserved_bytes"] == pytest.approx([60 * GIB])


def test_a_peak_that_is_not_known_leaves_the_mfu_out():
    steps = check(line(5).replace("23.10%", "N/A") + line(6)).steps()
    assert np.isnan(steps["mfu"]).tolist() == [True, False]


HEAD = f"""\
{LOGGER}torchtitan version: 0.2.0 (0.0.0 means __version__ is not defined correctly).
{LOGGER}Building 2-D device mesh with ['dp_shard', 'tp'], [8, 4]
{LOGGER}CUDA capacity: NVIDIA H100 80GB HBM3 with 79.18GiB memory
{LOGGER}\x1b[34mModel llama3 8B \x1b[31msize: 8,030,261,248 total parameters\x1b[39m
{LOGGER}Peak FLOPS used for computing MFU: 9.890e+14
{LOGGER}Trainer is initialized with local batch size 2, global batch size 64, \
gradient accumulation steps 4, sequence length 8192, total steps 1000 (warmup 200)
"""


def test_the_lines_before_the_first_step_are_kept():
    log = check(HEAD + line(1))
    assert log.facts == {
        "framework_version": "0.2.0",
        "num_devices": 32,
        "tp": 4,
        "device": "NVIDIA H100 80GB HBM3",
        "model": "llama3 8B",
        "num_parameters": 8_030_261_248,
        "micro_batch": 2,
        "global_batch": 64,
        "gradient_accumulation": 4,
        "seq_len": 8192,
        "total_steps": 1000,
    }
    assert log.remarks == ["the log's MFU is relative to a peak of 9.890e+14 FLOP/s"]


def test_the_mesh_as_it_is_printed_now():
    mesh = (
        "Building device mesh with parallelism: pp=2, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=4"
    )
    log = check(f"{HEAD}{LOGGER}{mesh}, etp=1\n{line(1)}")
    facts = log.facts
    assert (facts["num_devices"], facts["pp"], facts["tp"], facts["cp"], facts["ep"]) == (
        16,
        2,
        2,
        1,
        4,
    )


def test_a_pipeline_divides_the_local_batch_so_it_is_no_micro_batch():
    batch = HEAD.splitlines()[-1]
    log = check(
        f"{LOGGER}Building device mesh with parallelism: pp=2, dp_shard=4, tp=1\n{batch}\n{line(1)}"
    )
    assert "micro_batch" not in log.facts and log.facts["global_batch"] == 64


@pytest.mark.parametrize(
    ("sentence", "batch"),
    [
        (
            "Training starts at step 1, with local batch size 1, global batch size 8, "
            "sequence length 2048, total steps 10 (warmup 2)",
            8,
        ),
        (
            "Trainer is initialized with local batch size 1, global batch size 8, "
            "gradient_accumulation_steps: 1, sequence length 2048, total steps 10 (warmup 2)",
            8,
        ),
        (
            "Trainer is initialized with 4096 tokens per DP rank, 262144 tokens per train step, "
            "gradient accumulation steps 1, maximum context length 2048, total steps 10 (warmup 2)",
            128,
        ),
    ],
    ids=["2025", "accumulation", "tokens"],
)
def test_the_batch_in_every_wording(sentence: str, batch: int):
    facts = check(f"{LOGGER}{sentence}\n{line(1)}").facts
    assert facts["global_batch"] == batch
    assert facts["seq_len"] == 2048 and facts["total_steps"] == 10


@pytest.mark.parametrize(
    ("sentence", "name"),
    [
        ("GPU capacity: NVIDIA H100 (0) with 95.04GiB memory", "NVIDIA H100"),
        (
            "XPU capacity: Intel(R) Data Center GPU Max 1550 with 63.98GiB memory",
            "Intel(R) Data Center GPU Max 1550",
        ),
    ],
)
def test_the_devices_name(sentence: str, name: str):
    assert check(f"{LOGGER}{sentence}\n{line(1)}").facts["device"] == name


def test_the_log_interval_of_the_printed_arguments():
    text = f'{LOGGER}Running with args: {{"metrics": {{"log_freq": 10, "enable_wandb": false}}}}\n'
    assert check(text + line(10)).facts["log_interval"] == 10


def test_float8_layers_are_a_number_format():
    text = f"{LOGGER}Swapped to Float8Linear layers with enable_fsdp_float8_all_gather=True\n"
    assert check(text + line(1)).facts["dtype"] == "fp8"


def test_its_last_word_is_kept():
    assert check(f"{line(1)}{LOGGER}Training completed\n").end_line == f"{LOGGER}Training completed"


def test_a_restart_says_its_settings_again():
    restart = HEAD.replace("[8, 4]", "[4, 4]").replace(
        "global batch size 64", "global batch size 32"
    )
    log = check(HEAD + line(1) + line(10) + restart + line(10))
    assert log.facts["num_devices"] == 16 and log.facts["global_batch"] == 32
    assert log.steps().index[-1] == 10


def test_a_line_that_breaks_off_is_torn_and_its_last_number_unused():
    text = line(10) + line(20, "1,587")
    log = check(text[: text.rindex("1,587") + 3])
    assert log.incomplete_reason is not None
    assert np.isnan(log.steps()["tokens_per_s_per_device"]).tolist() == [False, True]
