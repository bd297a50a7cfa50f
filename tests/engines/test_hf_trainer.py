"""Hugging Face Trainer: dictionaries, bars, and one figure for the whole run from every rank.

Hugging Face Trainer: the step time of a whole run.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.engines.hf_trainer import LOG_FORMAT
from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import ParsedLog
from paceline.logs.parser import parse_log
from tests.engines.promises import check_read, read, reader_of

REAL = "logs/bigscience_hf_ds_gpt2_perf_n16_bs4-mbs8.txt"


def entry(epoch: float, loss: float = 2.5, **more: float) -> str:
    """A dictionary as versions before 5 print it."""
    fields = {"loss": loss, "grad_norm": 1.25, "learning_rate": 5e-05, "epoch": epoch, **more}
    return f"{fields}\n"


def quoted(epoch: float, loss: float = 2.5, **more: float) -> str:
    """A dictionary as version 5 prints it."""
    fields = {"loss": loss, "grad_norm": 1.25, "learning_rate": 5e-05, "epoch": epoch, **more}
    return f"{ {name: f'{value:.4g}' for name, value in fields.items()} }\n"


def bar(step: int, rate: str = " 2.00s/it", of: int = 100) -> str:
    return f"\r {step * 100 // of:2}%|#         | {step}/{of} [00:20<03:00, {rate}]"


def summary(run_time: float = 273.0144, rate: float = 3.663, **more: float) -> str:
    fields = {
        "train_runtime": run_time,
        "train_samples_per_second": rate,
        "train_steps_per_second": 0.457,
        "train_loss": 2.1,
        "epoch": 1.0,
        **more,
    }
    return f"{fields}\n"


check = reader_of("hf_trainer")


def test_the_real_log_gives_one_figure_for_the_run(reference_data: Path):
    content = (reference_data / REAL).read_bytes()
    assert LOG_FORMAT.step_line.search(content)
    log = read(LOG_FORMAT, content)
    assert log.figures == {"run_time_s": 273.0149, "samples_per_s": 3.663}
    assert log.facts == {"micro_batch": 8}, "the last of three attempts"
    assert len(log) == 0
    assert "1 significant digit" in log.remarks[0], "train_steps_per_second is printed as 0.007"
    assert "16 ranks print" in log.remarks[1]
    assert "272.9369 to 273.0149 s" in log.remarks[1]


@pytest.mark.parametrize("write", [entry, quoted], ids=["numbers", "text"])
def test_dictionaries_alone_are_counted(write: object):
    text = "".join(write(n / 10, loss=3 - n / 10) for n in range(1, 6))  # type: ignore[operator]
    assert LOG_FORMAT.step_line.search(text.encode())
    log = check(text)
    steps = log.steps()
    assert steps.index.tolist() == [1, 2, 3, 4, 5]
    assert steps["loss"] == pytest.approx([2.9, 2.8, 2.7, 2.6, 2.5])
    assert steps["grad_norm"].tolist() == [1.25] * 5
    assert not steps.known("step_time_s")
    assert log.remarks == [
        "5 lines with a loss have no step number and are counted as one step each"
    ]


def test_dictionaries_alone_are_counted_by_the_stated_interval():
    log = check("    logging_steps=10,\n" + "".join(entry(n / 10) for n in range(3)))
    assert log.steps().index.tolist() == [10, 20, 30]
    assert log.facts["log_interval"] == 10


def test_the_bar_drawn_again_behind_a_dictionary_has_its_step():
    parts = [bar(0, "?it/s")]
    for step in range(1, 41):
        parts.append(bar(step))
        if step % 10 == 0:
            parts += ["\r          \r", entry(step / 100, loss=step / 10), bar(step)]
    log = check("".join(parts))
    steps = log.steps()
    losses = dict(zip(steps.index.tolist(), steps["loss"].tolist(), strict=True))
    assert {n: x for n, x in losses.items() if x == x} == {10: 1.0, 20: 2.0, 30: 3.0, 40: 4.0}
    assert log.facts["total_steps"] == 100


@pytest.mark.parametrize(
    ("rate", "seconds", "resolution"), [(" 2.00s/it", 2.0, 0.01), (" 4.00it/s", 0.25, 0.01 / 16)]
)
def test_bars_alone_give_their_rate_as_printed(rate: str, seconds: float, resolution: float):
    text = "".join(
        bar(n, rate) + (entry(n / 100) + bar(n, rate) if n % 5 == 0 else "") for n in range(1, 31)
    )
    log = check(text)
    steps = log.steps()
    timed = np.isfinite(steps["step_time_s"])
    assert steps.index[timed].tolist() == list(range(5, 31))
    assert steps["step_time_s"][timed].tolist() == [seconds] * 26
    assert log.resolution_s == pytest.approx(resolution)
    assert "moving average" in log.remarks[-1]


def test_an_interval_of_dictionaries_is_not_that_of_the_bars():
    text = "logging_steps=5,\n" + "".join(
        bar(n) + (entry(n / 100) + bar(n) if n % 5 == 0 else "") for n in range(1, 31)
    )
    assert "log_interval" not in check(text).facts


def test_bars_of_others_are_not_the_runs():
    text = "".join(
        f"{entry(n / 100)}{bar(n)}{bar(n, of=8)}\nMap: 100%|##| 7/100000 [00:10<00:00,  9.00s/it]\n"
        for n in range(1, 7)
    )
    assert check(text).steps().index.tolist() == [1, 2, 3, 4, 5, 6]


def test_the_stated_total_tells_the_runs_bar():
    text = "[INFO] >>   Total optimization steps = 100\n" + "".join(
        f"{entry(n / 100)}{bar(3, of=8)}{bar(n)}" for n in range(1, 5)
    )
    log = check(text)
    assert log.steps().index.tolist() == [1, 2, 3, 4]


def test_running_totals_of_time_and_tokens_give_each_step_its_own():
    times = [27.3002, 30.8283, 34.3821, 37.9205]
    text = "".join(
        bar(n)
        + entry(
            n / 100,
            num_input_tokens_seen=196_608 * n,
            train_runtime=time,
            train_tokens_per_second=7201.711,
        )
        + bar(n)
        for n, time in enumerate(times, start=1)
    )
    log = check(text)
    steps = log.steps()
    assert steps.index.tolist() == [1, 2, 3, 4]
    assert steps["step_time_s"] == pytest.approx([27.3002, 3.5281, 3.5538, 3.5384])
    assert steps["tokens"].tolist() == [196_608.0] * 4
    assert log.resolution_s == pytest.approx(1e-4)
    assert not log.figures


def test_running_totals_over_ten_steps_are_divided_by_ten():
    text = "".join(
        entry(n / 100, train_runtime=40 + 2.5 * n, num_input_tokens_seen=4096 * n) + bar(n)
        for n in range(10, 60, 10)
    )
    log = check(text)
    steps = log.steps()
    assert steps.index.tolist() == [10, 20, 30, 40, 50]
    assert np.isnan(steps["step_time_s"][0])
    assert steps["step_time_s"][1:].tolist() == [2.5] * 4
    assert steps["tokens"][1:].tolist() == [4096.0] * 4
    assert log.resolution_s == pytest.approx(1e-5)


def test_running_totals_in_quotes_have_four_digits():
    text = "".join(quoted(n / 100, train_runtime=1000 + 20 * n) + bar(n) for n in range(1, 5))
    log = check(text)
    assert log.steps()["step_time_s"][1:].tolist() == [20.0] * 3
    assert log.resolution_s == pytest.approx(1.0)


def test_without_a_step_number_no_time_is_claimed():
    log = check("".join(entry(n / 100, train_runtime=2.5 * n) for n in range(1, 6)))
    assert not log.steps().known("step_time_s")


def test_dictionaries_that_come_late_do_not_spoil_the_bars():
    """A program that writes into a file holds its output back until some KiB are together."""
    text = entry(0.01) + "".join(bar(n) for n in range(1, 31))
    text += "".join(entry(n / 100, loss=float("nan") if n == 9 else 2.5) for n in range(2, 12))
    text += "".join(bar(n) for n in range(31, 41))
    steps = check(text).steps()
    assert steps.index.tolist() == list(range(1, 41))
    assert np.isfinite(steps["step_time_s"]).all()
    assert np.isinf(steps["loss"]).any(), "that a loss was NaN is kept"


def test_evaluations_are_no_steps():
    evaluation = "{'eval_loss': 0.59, 'eval_runtime': 5.187, 'eval_samples_per_second': 78.658}\n"
    log = check(entry(0.1) + evaluation + entry(0.2))
    assert log.steps()["loss"].tolist() == [2.5, 2.5]
    assert not log.figures


@pytest.mark.parametrize(("first", "factor"), [(True, 1.0), (False, 2.0)])
def test_evaluations_within_the_run_time_are_subtracted(first: bool, factor: float):
    """`train_runtime` begins with the training, so that an earlier evaluation is not in it."""
    evaluation = "{'eval_loss': 0.5, 'eval_runtime': 100.0, 'epoch': 1.0}\n"
    training = entry(0.1) + entry(0.2)
    text = evaluation + training if first else training + evaluation
    log = check(
        f"{text}{{'train_runtime': 200.0, 'train_samples_per_second': 16.0, "
        "'train_steps_per_second': 0.500, 'epoch': 1.0}\n"
    )
    assert log.figures["samples_per_s"] == pytest.approx(16 * factor)
    assert ("evaluation_s" in log.figures) is not first


def test_a_loss_that_is_no_number_is_infinite():
    text = entry(0.1) + entry(0.2, loss=float("nan")) + quoted(0.3, loss=float("nan"))
    assert np.isinf(check(text).steps()["loss"]).tolist() == [False, True, True]


def test_every_rank_prints_the_summary_and_the_longest_counts():
    text = entry(0.5) + "".join(
        f"[default{rank}]:" + summary(run_time, rate)
        for rank, (run_time, rate) in enumerate([(273.01, 3.663), (272.94, 3.664), (273.02, 3.663)])
    )
    log = check(text)
    assert log.figures == {"run_time_s": 273.02, "samples_per_s": 3.663, "steps_per_s": 0.457}
    assert "3 ranks print" in log.remarks[-1]


def test_of_several_runs_in_one_log_the_last_counts():
    log = check(summary(100.0, 10.0) * 2 + summary(50.0, 20.0) * 2)
    assert log.figures["run_time_s"] == 50.0 and log.figures["samples_per_s"] == 20.0
    assert "2 ranks print" in log.remarks[-1]


def test_an_attempt_that_begins_anew_forgets_the_one_before():
    begin = "[INFO|trainer.py:2519] 2025-12-31 >> ***** Running training *****\n"
    text = begin + entry(0.1) + entry(0.2) + summary() + begin + entry(0.1, loss=9.5)
    log = read(LOG_FORMAT, text.encode())
    assert log.figures == {}
    assert log.steps()["loss"][-1] == 9.5


def test_tokens_per_second_count_when_they_are_of_all_devices():
    fields = {"train_tokens_per_second": 46_213.7, "num_input_tokens_seen": 19_660_800.0}
    log = check(summary(425.4295, 5.641, **fields))
    assert log.figures["tokens_per_s"] == pytest.approx(46_213.7)


def test_tokens_per_second_of_one_process_are_left_out():
    fields = {"train_tokens_per_second": 1925.584, "num_input_tokens_seen": 19_660_800.0}
    log = check(summary(425.4295, 5.641, **fields))
    assert "tokens_per_s" not in log.figures
    assert "only the tokens of one process" in log.remarks[-1]


def test_tokens_per_second_on_one_device_need_no_proof():
    text = BLOCK.replace("= 24", "= 2") + summary(100.0, 5.0, train_tokens_per_second=306.5)
    log = check(text)
    assert log.facts["num_devices"] == 1 and log.figures["tokens_per_s"] == 306.5


BLOCK = """\
[INFO|trainer.py:2519] >> ***** Running training *****
[INFO|trainer.py:2520] >>   Num examples = 2,400
[INFO|trainer.py:2521] >>   Num Epochs = 9,223,372,036,854,775,807
[INFO|trainer.py:2522] >>   Instantaneous batch size per device = 2
[INFO|trainer.py:2525] >>   Total train batch size (w. parallel, distributed & accumulation) = 24
[INFO|trainer.py:2526] >>   Gradient Accumulation steps = 1
[INFO|trainer.py:2527] >>   Total optimization steps = 1,000
[INFO|trainer.py:2528] >>   Number of trainable parameters = 51,492,278
"""


@pytest.mark.parametrize(
    "fields",
    [
        "'loss': 2.5, 'learning_rate': 1e-05, 'epoch': 0.1, 'max_steps': 100, 'logging_steps': 5",
        "'max_steps': 100, 'logging_steps': 5, 'loss': 2.5, 'learning_rate': 1e-05, 'epoch': 0.1",
    ],
)
def test_a_record_that_repeats_settings_stays_whole(fields: str):
    text = "".join(
        f"{{{fields}, 'step': {n}, 'train_runtime': {2.0 * n}}}\n" for n in range(5, 50, 5)
    )
    steps = check_read(LOG_FORMAT, text.encode()).steps()
    assert steps.index.tolist() == list(range(5, 50, 5))
    assert steps["loss"] == pytest.approx([2.5] * 9)
    assert steps["step_time_s"][1:] == pytest.approx([2.0] * 8)


def test_the_block_before_the_first_step_is_kept():
    log = check(BLOCK + entry(0.1))
    assert log.facts == {
        "micro_batch": 2,
        "global_batch": 24,
        "gradient_accumulation": 1,
        "total_steps": 1000,
        "num_devices": 12,
    }


def test_deepspeeds_print_is_kept():
    text = """\
[2021-05-26 04:38:20,033] [INFO] [config.py:752:print]   train_batch_size ............. 64
[2021-05-26 04:38:20,033] [INFO] [config.py:752:print]   train_micro_batch_size_per_gpu  4
[2021-05-26 04:38:20,033] [INFO] [config.py:752:print]   world_size ................... 16
[2021-05-26 04:38:20,033] [INFO] [config.py:752:print]   zero_optimization_stage ...... 3
[2021-05-26 04:38:20,033] [INFO] [config.py:752:print]   gradient_accumulation_steps .. 1
    "train_batch_size": 99,
"""
    assert check(text + entry(0.1)).facts == {
        "global_batch": 64,
        "micro_batch": 4,
        "num_devices": 16,
        "zero_stage": 3,
        "gradient_accumulation": 1,
    }


def test_printed_arguments_are_kept():
    text = "TrainingArguments(\nbf16=True,\nfp16=False,\nlogging_steps=500,\nmax_steps=-1,\n"
    text += "per_device_train_batch_size=8,\nper_device_eval_batch_size=64,\n)\n"
    assert check(text + entry(0.1)).facts == {
        "dtype": "bf16",
        "log_interval": 500,
        "micro_batch": 8,
    }


def test_the_result_of_a_notebook_has_the_steps_it_did():
    text = (
        "TrainOutput(global_step=10686, training_loss=3.81, metrics={'train_runtime': 1332.6534, "
        "'train_samples_per_second': 8.019, 'total_flos': 1571537744307456, 'epoch': 1.0})\n"
    )
    assert check(text).figures == {
        "timed_steps": 10_686.0,
        "run_time_s": 1332.6534,
        "samples_per_s": 8.019,
        "steps_per_s": 10_686 / 1332.6534,
    }


def test_the_trainers_own_file_has_step_numbers():
    history = [
        {"epoch": n / 100, "grad_norm": 1.5, "learning_rate": 5e-5, "loss": 4 - n / 100, "step": n}
        for n in range(10, 60, 10)
    ]
    end = {
        "epoch": 0.5,
        "step": 50,
        "total_flos": 1.5e15,
        "train_loss": 2.5,
        "train_runtime": 100.5,
        "train_samples_per_second": 7.96,
        "train_steps_per_second": 0.498,
    }
    state = {
        "best_metric": None,
        "global_step": 50,
        "log_history": [*history, end],
        "logging_steps": 10,
        "max_steps": 50,
        "train_batch_size": 4,
        "trial_name": None,
    }
    text = json.dumps(state, indent=2, sort_keys=True)
    assert LOG_FORMAT.step_line.search(text.encode())
    log = check(text)
    assert log.steps().index.tolist() == [10, 20, 30, 40, 50]
    assert log.steps()["loss"] == pytest.approx([3.9, 3.8, 3.7, 3.6, 3.5])
    assert log.figures == {
        "run_time_s": 100.5,
        "samples_per_s": 7.96,
        "steps_per_s": 50 / 100.5,
        "timed_steps": 50,
    }
    assert log.facts == {"log_interval": 10, "total_steps": 50}


def test_running_totals_in_the_trainers_own_file_give_times():
    history = [
        {
            "epoch": n / 100,
            "loss": 2.5,
            "num_input_tokens_seen": 512 * n,
            "step": n,
            "train_runtime": 9 + 1.5 * n,
        }
        for n in range(10, 60, 10)
    ]
    steps = check(json.dumps({"log_history": history}, indent=2)).steps()
    assert steps["step_time_s"][1:].tolist() == [1.5] * 4
    assert steps["tokens"][1:].tolist() == [512.0] * 4


def test_its_last_word_is_kept():
    text = "\n\nTraining completed. Do not forget to share your model on huggingface.co/models =)\n"
    log = check(entry(0.1) + text + summary())
    assert log.end_line == text.strip()


def test_a_brace_inside_a_bar_makes_it_none():
    text = "".join(entry(n / 100, train_runtime=2.5 * n) + bar(n) for n in range(1, 6))
    damaged = text.replace("3/100 [00:20", "3/100 [{:20")
    assert check(damaged).steps().index.tolist() == [1, 2, 3, 4, 5]


def test_braces_without_end_are_passed_over_quickly():
    log = check_read(LOG_FORMAT, b"{" * 4000 + b"{'loss': 1.5, 'epoch': 0.1}" + b"{a" * 3000)
    assert log.steps()["loss"].tolist() == [1.5]


STATED = (
    "***** Running training *****\n  Num examples = 1,000\n  Num Epochs = 1\n"
    "  Instantaneous batch size per device = 8\n"
    "  Total train batch size (w. parallel, distributed & accumulation) = 32\n"
    "  Gradient Accumulation steps = 1\n  Total optimization steps = 32\n"
)


def parsed(tmp_path: Path, text: str) -> ParsedLog:
    path = tmp_path / "train.log"
    path.write_text(text)
    return parse_log(path, UserSettings()).document


def test_the_step_time_is_run_time_over_steps_though_the_last_batch_is_a_part(tmp_path: Path):
    """1,000 samples are 31 batches of 32 and one of 8: 32 steps of 2 s."""
    log = parsed(tmp_path, STATED + entry(0.5) + summary(64.0, 15.625, train_steps_per_second=0.5))
    assert log.step_time_s is not None and log.step_time_s.median == 2.0
    assert log.samples_per_s == pytest.approx(15.625)
    assert log.disagreements == ()


def test_run_time_and_steps_are_enough(tmp_path: Path):
    text = STATED + entry(0.5) + "{'train_runtime': 64.0, 'train_loss': 2.1, 'epoch': 1.0}\n"
    log = parsed(tmp_path, text)
    assert log.status == "ok" and log.window is not None and log.window.rule == "as printed"
    assert log.step_time_s is not None and log.step_time_s.median == 2.0
    assert log.samples_per_s == 16.0


def test_steps_before_a_checkpoint_or_behind_an_early_stop_took_no_time(tmp_path: Path):
    resumed = STATED + "  Continuing training from global step 16\n"
    log = parsed(tmp_path, resumed + entry(0.5) + "{'train_runtime': 32.0}\n")
    assert log.step_time_s is not None and log.step_time_s.median == 2.0
    stopped = STATED + entry(0.5) + "{'train_runtime': 16.0}\n" + bar(8, of=32)
    assert check(stopped).figures["timed_steps"] == 8
