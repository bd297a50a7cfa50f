"""A log of any kind gets a status, and its figures follow from its own step times."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import ParsedLog
from paceline.logs.parser import log_files, parse_log
from paceline.report.logs import log_lines
from tests.example import noisy
from tests.logs.example import chat_log, maxtext_log, megatron_line, megatron_log, titan_log

NOTHING = UserSettings()
LLAMA = UserSettings(model="llama31-8b", device="B200", num_devices=8, seq_len=8192, dtype="bf16")
"""The batch is in Megatron's lines."""


def parsed(
    folder: Path, text: str | bytes, settings: UserSettings = NOTHING, name: str = "a.log"
) -> ParsedLog:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return parse_log(path, settings).document


def steady(n: int = 40, centre: float = 5.7) -> list[float]:
    return noisy(n, centre, 0.01)


def test_figures_follow_from_the_step_times_and_what_the_user_adds(tmp_path: Path):
    log = parsed(
        tmp_path, megatron_log([44.0, 7.0, *steady()]), replace(LLAMA, convention="causal")
    )
    assert (log.engine, log.status, log.n_steps) == ("megatron", "ok", 42)
    assert log.window is not None and log.window.n_warmup == 2 and log.window.global_batch == 128
    assert log.step_time_s is not None and log.step_time_s.median == pytest.approx(5.7, rel=0.002)
    assert log.tokens_per_s == pytest.approx(128 * 8192 / log.step_time_s.median)
    assert log.samples_per_s == pytest.approx(128 / log.step_time_s.median)
    flops = log.metrics["model_flops_per_s_per_device"]
    assert flops.convention == "causal" and flops.value is not None
    assert flops.value == pytest.approx(1183.6e12, rel=0.005)  # as Megatron prints at 5.70 s
    assert log.metrics["mfu"].value == pytest.approx(flops.value / 2250e12, rel=1e-6)


@pytest.mark.parametrize("convention", ["six-n", "six-n+recompute"])
def test_model_and_hardware_flops_have_names_of_their_own(tmp_path: Path, convention: str):
    """The row of BigScience's 1.3B study that recomputes, at 29 s a step."""
    settings = UserSettings(recipe="gpt-1b3", num_devices=8, convention=convention)
    text = megatron_log([29.0] * 12).replace("global batch size:   128", "global batch size:   512")
    log = parsed(tmp_path, text, settings)
    model, hardware = (
        log.metrics[f"{kind}_flops_per_s_per_device"] for kind in ("model", "hardware")
    )
    assert (model.convention, hardware.convention) == ("six-n", "six-n+recompute")
    assert model.value == pytest.approx(35.25e12, rel=1e-3)
    assert hardware.value == pytest.approx(47.0e12, rel=1e-3)
    shown = "\n".join(log_lines(log))
    assert "35.25 TFLOP/s per device (six-n), 47.01 TFLOP/s per device (six-n+recompute)" in shown


def test_days_are_paid_at_the_mean_step(tmp_path: Path):
    log = parsed(tmp_path, megatron_log(steady()), replace(LLAMA, total_tokens=1e12))
    assert log.step_time_s is not None and log.tokens_per_s is not None
    days = 1e12 / (128 * 8192 / log.step_time_s.mean) / 86400
    assert log.metrics["days_to_train"].value == pytest.approx(days)


def test_the_interval_of_a_coarse_log_holds_what_was_rounded_away(tmp_path: Path):
    times = np.round(np.random.default_rng(1).normal(2.337, 0.003, 60), 1)
    step = parsed(tmp_path, maxtext_log(times.tolist())).metrics["step_time_s"]
    assert step.value == 2.3 and step.low is not None and step.high is not None
    assert step.low < 2.337 < step.high


def test_without_additions_nothing_is_guessed(tmp_path: Path):
    log = parsed(tmp_path, maxtext_log(steady()))
    assert log.status == "ok" and log.tokens_per_s is None and log.samples_per_s is None
    note = log.metrics["model_flops_per_s_per_device"].note or ""
    assert "model" in note and "global batch" in note


def test_a_printed_figure_in_another_convention_is_explained(tmp_path: Path):
    times = steady()
    log = parsed(
        tmp_path, megatron_log(times, tflops=1331.5), replace(LLAMA, convention="causal")
    )  # 1183.6 x 1.125
    assert log.reported["tflops_per_device"] == pytest.approx(1331.5)
    (disagreement,) = log.disagreements
    assert disagreement.figure == "tflops_per_device" and "full-attention" in disagreement.cause


def test_a_printed_figure_that_follows_is_no_finding(tmp_path: Path):
    log = parsed(
        tmp_path, megatron_log(steady(), tflops=1183.6), replace(LLAMA, convention="causal")
    )
    assert log.disagreements == ()


def test_a_ramped_batch_never_mixes_with_the_rest(tmp_path: Path):
    first = [megatron_line(n, 2.0, batch=64) for n in range(1, 21)]
    rest = [megatron_line(n, 4.0, batch=128) for n in range(21, 61)]
    log = parsed(tmp_path, "".join(first + rest))
    assert log.window is not None and log.window.global_batch == 128
    assert log.window.first_step == 21 and log.samples_per_s == pytest.approx(32.0)


def test_lines_that_average_say_over_how_many_steps(tmp_path: Path):
    lines = [megatron_line(n, 5.7) for n in range(10, 210, 10)]
    (path := tmp_path / "a.log").write_text("".join(lines))
    steps = parse_log(path, UserSettings()).steps
    assert set(steps.averaged_over.tolist()) == {10}


def test_few_steps_are_ok_with_a_warning(tmp_path: Path):
    log = parsed(tmp_path, megatron_log([5.7, 5.7, 5.7]))
    assert log.status == "ok" and log.step_time_s is not None and log.step_time_s.n == 3
    assert any(w.startswith("few-steps") for w in log.warnings)


def test_one_figure_for_the_whole_run_is_as_printed(tmp_path: Path):
    settings = UserSettings(recipe="opt-350m-sft", num_devices=8)
    log = parsed(tmp_path, chat_log(), settings)
    assert log.engine == "deepspeed_chat" and log.status == "ok"
    assert log.window is not None and (log.window.rule, log.window.n) == ("as printed", 1)
    assert log.samples_per_s == pytest.approx(943.455)
    assert log.step_time_s is not None and log.step_time_s.median == pytest.approx(192 / 943.455)
    assert log.step_time_s.mad is None and log.step_time_s.n == 1
    assert log.metrics["samples_per_s"].spread is None


def test_the_step_lines_beside_one_figure_can_be_asked_for(tmp_path: Path):
    settings = UserSettings(recipe="opt-350m-sft", num_devices=8, window="auto")
    log = parsed(tmp_path, chat_log(), settings)
    assert log.window is not None and log.window.rule == "auto" and log.n_steps == 10
    assert log.samples_per_s == pytest.approx(950.0, rel=0.01)


def test_a_running_average_is_told_from_the_figure(tmp_path: Path):
    log = parsed(tmp_path, chat_log(), UserSettings(recipe="opt-350m-sft", num_devices=8))
    averages = [d for d in log.disagreements if d.figure == "running_samples_per_s"]
    assert averages and "running average" in averages[0].cause


def test_one_figure_without_a_batch_gives_a_rate_and_no_step_time(tmp_path: Path):
    text = "Throughput: 943.455 samples/sec\nExecution time: 18.3 seconds for 90 steps\n"
    log = parsed(tmp_path, text)
    assert log.status == "ok" and log.samples_per_s == pytest.approx(943.455)
    assert log.step_time_s is None and log.tokens_per_s is None


@pytest.mark.parametrize(
    ("rule", "steps"),
    [
        ("35:44", (35, 44, 10)),
        ("last", (50, 50, 1)),
        ("skip:5", (6, 50, 45)),
        ("auto", (1, 50, 50)),
    ],
)
def test_the_window_can_be_asked_for(tmp_path: Path, rule: str, steps: tuple[int, int, int]):
    log = parsed(tmp_path, megatron_log(steady(50)), UserSettings(window=rule))
    window = log.window
    assert window is not None
    assert (window.rule, window.first_step, window.last_step, window.n) == (rule, *steps)


@pytest.mark.parametrize("rule", ["60:70", "skip:999"])
def test_a_window_that_picks_nothing_is_refused(tmp_path: Path, rule: str):
    with pytest.raises(UserError, match=rf"--window {rule}"):
        parsed(tmp_path, megatron_log(steady(50)), UserSettings(window=rule))


def test_the_users_word_goes_before_the_logs_and_is_held_against_it(tmp_path: Path):
    log = parsed(tmp_path, chat_log(), UserSettings(recipe="opt-350m-sft", num_devices=16))
    assert log.settings.num_devices == 16
    assert any("16 was given, but the log reports 8" in w for w in log.warnings)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", "empty"),
        (b"dear diary, nothing was trained today\n", "not-a-training-log"),
        (bytes(range(256)) * 40, "not-a-training-log"),
        (b"\xff\xfei\x00t\x00e\x00r\x00", "unreadable"),
        (gzip.compress(b"", mtime=0)[:7], "truncated"),
    ],
)
def test_every_file_has_a_status(tmp_path: Path, content: bytes, status: str):
    log = parsed(tmp_path, content)
    assert log.status == status and log.n_steps == 0
    assert log.reason


def test_a_nan_loss_is_a_status_with_its_step(tmp_path: Path):
    lines = megatron_log(steady(20)) + megatron_line(21, 5.7, loss="nan")
    log = parsed(tmp_path, lines)
    assert log.status == "nan" and "step 21" in (log.reason or "")


def test_running_out_of_memory_is_a_status(tmp_path: Path):
    end = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    log = parsed(tmp_path, megatron_log(steady(20)) + end)
    assert log.status == "oom" and log.n_steps == 20


def test_a_cut_gzip_is_truncated_and_keeps_its_steps(tmp_path: Path):
    compressed = gzip.compress(megatron_log(steady(2000)).encode())
    log = parsed(tmp_path, compressed[: len(compressed) // 2], name="a.log.gz")
    assert log.status == "truncated" and 0 < log.n_steps < 2000


def test_gzip_and_plain_give_the_same(tmp_path: Path):
    text = megatron_log(steady())
    plain = parsed(tmp_path, text)
    packed = parsed(tmp_path, gzip.compress(text.encode()), name="a.log.gz")
    assert packed.step_time_s == plain.step_time_s


def test_a_forced_engine_reads_what_detection_would_not(tmp_path: Path):
    text = megatron_log(steady()) + maxtext_log([2.0] * 10)
    assert parsed(tmp_path, text, UserSettings(engine="maxtext")).n_steps == 10
    with pytest.raises(UserError, match="is unknown"):
        parsed(tmp_path, text, UserSettings(engine="megatrom"))


def test_a_folder_is_searched_to_its_ends_in_order(tmp_path: Path):
    for name in ("b/2.log", "a.log", "b/1.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [str(path.relative_to(tmp_path)) for path in log_files([tmp_path])]
    assert names == ["a.log", "b/1.bin", "b/2.log"]
    with pytest.raises(UserError, match="does not exist"):
        log_files([tmp_path / "c"])


def test_a_file_that_may_not_be_read_is_unreadable(tmp_path: Path):
    import os

    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    log = parse_log(fifo, UserSettings()).document
    assert log.status == "unreadable" and "not a regular file" in (log.reason or "")
    dangling = tmp_path / "gone"
    dangling.symlink_to(tmp_path / "nowhere")
    assert parse_log(dangling, UserSettings()).document.status == "unreadable"


def test_a_folder_that_cannot_be_searched_is_not_left_out(tmp_path: Path):
    log = parse_log(tmp_path, UserSettings()).document
    assert log.status == "unreadable" and "searched" in (log.reason or "")


def test_a_name_of_any_bytes_can_be_written(tmp_path: Path):
    path = tmp_path / "train-\udcff.log"
    path.write_text(megatron_log(steady()))
    log = parse_log(path, UserSettings()).document
    assert log.status == "ok" and log.file.encode("utf-8").endswith(b"train-?.log")


def test_a_batch_that_is_given_goes_before_the_one_in_the_step_lines(tmp_path: Path):
    log = parsed(tmp_path, megatron_log(steady()), replace(LLAMA, global_batch=256))
    assert log.step_time_s is not None and log.settings.global_batch == 256
    assert log.samples_per_s == pytest.approx(256 / log.step_time_s.median)
    assert "global batch 256 was given, but the step lines report 128" in log.warnings


def test_a_length_that_no_line_contradicts_is_no_contradiction(tmp_path: Path):
    log = parsed(tmp_path, megatron_log(steady()), replace(LLAMA, global_batch=128))
    assert not any("was given" in warning for warning in log.warnings)


def test_one_of_many_logs_may_lack_the_window(tmp_path: Path):
    (path := tmp_path / "a.log").write_text(megatron_log(steady(20)))
    log = parse_log(path, UserSettings(window="35:44"), one_of_many=True).document
    assert log.status == "ok" and log.n_steps == 20
    assert log.window is None and log.step_time_s is None and log.metrics == {}
    assert (
        "--window 35:44 selects none of the 20 timed steps; the log has steps 1-20" in log.warnings
    )


def test_a_rate_of_one_device_is_a_printed_throughput(tmp_path: Path):
    log = parsed(tmp_path, titan_log())
    assert (log.engine, log.status, log.tokens_per_s) == ("torchtitan", "ok", None)
    rate = log.metrics["tokens_per_s_per_device"].value
    assert rate == pytest.approx(7001.45) == log.reported["tokens_per_s_per_device"]


def test_without_a_batch_a_rate_gives_all_that_does_not_need_it(tmp_path: Path):
    settings = replace(LLAMA, device="H100-SXM", total_tokens=1e12)
    rate = parsed(tmp_path, titan_log(), settings)
    with_batch = parsed(tmp_path, titan_log(), replace(settings, global_batch=64))
    assert rate.step_time_s is None and "step_time_s" not in rate.metrics
    assert rate.settings.global_batch is None and with_batch.step_time_s is not None
    assert rate.tokens_per_s == pytest.approx(8 * 7001.45)
    for name in (
        "tokens_per_s",
        "samples_per_s",
        "model_flops_per_s_per_device",
        "mfu",
        "days_to_train",
    ):
        assert rate.metrics[name].value == pytest.approx(with_batch.metrics[name].value, rel=1e-6)


def test_the_rate_of_a_whole_run_gives_mfu_without_a_batch(tmp_path: Path):
    text = (
        "{'train_runtime': 100.0, 'train_samples_per_second': 8.0, "
        "'train_steps_per_second': 0.01}\n"
    )
    log = parsed(tmp_path, text, LLAMA)
    assert log.samples_per_s == 8.0 and log.tokens_per_s == 8.0 * 8192
    flops = log.metrics["model_flops_per_s_per_device"]
    assert flops.value == pytest.approx(8192 * 51.5e9, rel=0.001)
    assert flops.statistic == "as printed"


def test_steps_and_samples_a_second_give_the_mean_batch(tmp_path: Path):
    text = (
        "{'train_runtime': 100.0, 'train_samples_per_second': 8.0, "
        "'train_steps_per_second': 0.251}\n"
    )
    log = parsed(tmp_path, text)
    assert log.step_time_s is not None and log.step_time_s.median == pytest.approx(1 / 0.251)
    assert log.samples_per_s == pytest.approx(8.0) and log.settings.global_batch is None


def test_one_figure_for_the_whole_run_has_no_percentiles(tmp_path: Path):
    log = parsed(tmp_path, chat_log(), UserSettings(recipe="opt-350m-sft", num_devices=8))
    assert log.metrics["step_time_p95_s"].value is None and log.metrics["step_time_p95_s"].note


def test_more_than_a_device_can_reach_is_doubted(tmp_path: Path):
    log = parsed(tmp_path, megatron_log(steady()), replace(LLAMA, num_devices=1))
    assert any("more than a device can reach" in warning for warning in log.warnings)
    log = parsed(tmp_path, megatron_log(steady()), LLAMA)
    assert not any("more than a device can reach" in warning for warning in log.warnings)


def test_without_a_dtype_the_narrowest_ones_peak_is_doubted(tmp_path: Path):
    user = replace(LLAMA, device="H100", dtype=None)
    low, high = (
        parsed(tmp_path, megatron_log(steady(), tflops=printed), replace(user, num_devices=n))
        for n, printed in ((8, 1183.6), (1, 1183.6))
    )
    assert not any("can reach" in warning for warning in low.warnings)
    assert any("of the dense peak in fp8, is more than" in warning for warning in high.warnings)
    printed = parsed(tmp_path, megatron_log(steady(), tflops=2500), user)
    assert any(warning.startswith("the log's own figure: 2,500") for warning in printed.warnings)


def test_a_figure_that_happens_to_be_round_is_still_held_against_ours(tmp_path: Path):
    tflops = [1196.3, 1199.7, 1200.0, 1200.0, 1200.0, 1200.4, 1202.8]
    lines = [megatron_line(n, 5.7, tflops=v) for n, v in enumerate(tflops, start=1)]
    log = parsed(tmp_path, "".join(lines), replace(LLAMA, convention="causal"))
    assert [d.figure for d in log.disagreements] == ["tflops_per_device"]  # 1200 against 1183.6


def test_the_count_of_printed_flops_is_named(tmp_path: Path):
    log = parsed(tmp_path, megatron_log(steady(), tflops=1183.6), LLAMA)
    assert log.conventions["printed_flops"] == "causal in current versions of Megatron-LM"
    silent = parsed(tmp_path, megatron_log(steady()), LLAMA)
    assert "printed_flops" not in silent.conventions


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_named_with_a_mark_and_without(tmp_path: Path, encoding: str):
    path = tmp_path / "a.log"
    path.write_bytes(megatron_log([1.0] * 20).encode(encoding))
    log = parse_log(path, UserSettings()).document

    assert log.status == "unreadable" and "UTF-16" in str(log.reason)
    name = {"utf-16": "UTF-16", "utf-16-le": "UTF-16LE", "utf-16-be": "UTF-16BE"}[encoding]
    assert f"iconv -f {name} -t" in str(log.reason)


@pytest.mark.parametrize("damage", [b"\0" * 9000, b"\0a" * 3 + b"plain text " * 99])
def test_zeros_alone_are_no_utf16(tmp_path: Path, damage: bytes):
    path = tmp_path / "a.log"
    path.write_bytes(damage + b"\n" + megatron_log([1.0] * 20).encode())
    assert parse_log(path, UserSettings()).document.status == "ok"
