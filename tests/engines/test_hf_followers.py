"""What is built upon Hugging Face's Trainer prints its lines: TRL, axolotl, LLaMA-Factory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.units import GIB
from paceline.engines.hf_trainer.log_format import LOG_FORMAT, STEP_TIME_REMARK
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from tests.engines.promises import parsed, reader_of


# After trainer/grpo_trainer.py of huggingface/trl, 2025-2026.
def trl(number: int, **more: object) -> dict[str, object]:
    return {
        "loss": 0.0123,
        "grad_norm": 0.25,
        "learning_rate": 1e-06,
        "num_tokens": 280_752.0 * number,
        "completions/mean_length": 163.0,
        "rewards/accuracy/mean": 0.375,
        "reward": 0.375,
        "epoch": 0.02 * number,
        **more,
    }


# After core/trainers/base.py and utils/callbacks/tokens_per_second.py of axolotl, 2025-2026.
def axolotl(step: int) -> dict[str, object]:
    return {
        "loss": "1.105",
        "grad_norm": "5.17",
        "learning_rate": "2e-05",
        "ppl": "3.02",
        "memory/max_active (GiB)": "54.25",
        "memory/max_allocated (GiB)": "54.2",
        "memory/device_reserved (GiB)": "61.5",
        "tokens/train_per_sec_per_gpu": "3049",
        "tokens/total": str(65_536 * step),
        "tokens/trainable": str(50_000 * step),
        "epoch": f"{0.01 * step:.4g}",
    }


def bar(step: int, rate: str = " 2.50s/it") -> str:
    return f"\r  1%|#         | {step}/500 [00:20<03:00, {rate}]"


check = reader_of("hf_trainer")


def test_trls_tokens_are_a_running_total():
    text = "".join(f"{trl(n)}\n{bar(n)}" for n in range(1, 6))
    assert LOG_FORMAT.step_line.search(text.encode())
    steps = check(text).steps()
    assert steps.index.tolist() == [1, 2, 3, 4, 5]
    assert steps["tokens"].tolist() == [280_752.0] * 5


def test_trls_own_time_counts_where_no_bar_times_the_steps():
    text = "".join(f"{trl(n, step_time=12.5)}\n" for n in range(1, 6))
    log = check(text)
    assert log.steps()["step_time_s"].tolist() == [12.5] * 5
    assert STEP_TIME_REMARK in log.remarks


def test_a_bar_goes_before_trls_own_time():
    text = "".join(f"{trl(n, step_time=2.25)}\n{bar(n)}" for n in range(1, 6))
    log = check(text)
    assert log.steps()["step_time_s"][1:] == pytest.approx([2.5] * 4, abs=0.06)
    assert STEP_TIME_REMARK not in log.remarks


def test_the_time_of_all_goes_before_that_of_the_passes():
    more = {"step_time": 2.25, "iteration_time_s": 9.75}
    text = "".join(f"{trl(n, **more)}\n" for n in range(1, 6))
    assert check(text).steps()["step_time_s"].tolist() == [9.75] * 5


def test_axolotls_memory_and_tokens_are_kept_and_its_rate_is_not():
    text = "".join(f"{axolotl(n)}\n{bar(n)}" for n in range(1, 6))
    assert LOG_FORMAT.step_line.search(text.encode())
    log = check(text)
    steps = log.steps()
    assert steps["loss"] == pytest.approx([1.105] * 5)
    assert steps["tokens"][1:].tolist() == [65_536.0] * 4
    assert log.memory_bytes == {"allocated": pytest.approx(54.2 * GIB)}
    assert not steps.known("tokens_per_s_per_device"), "it counts trainable tokens only"


@pytest.mark.parametrize(("rate", "is_told"), [(65536, True), (6000, False)])
def test_axolotls_rate_of_a_device_that_is_above_all_tokens_is_a_sum(
    tmp_path: Path, rate: int, is_told: bool
):
    lines = [
        "  Total train batch size (w. parallel, distributed & accumulation) = 32",
        *(
            f"{{'loss': 1.2, 'learning_rate': 1e-05, 'tokens/train_per_sec_per_gpu': {rate}.0, "
            f"'epoch': 0.01}}\n  {n}%|1   | {n}/100 [00:02<03:18,  2.00s/it]"
            for n in range(1, 16)
        ),
    ]
    path = tmp_path / "train.log"
    path.write_text("***** Running training *****\n" + "\n".join(lines) + "\n")
    document = parse_log(path, UserSettings(seq_len=4096, num_devices=8)).document
    causes = [each.cause for each in document.disagreements]
    assert causes == ["it is of all 8 devices together, not of one"] * is_told


def test_a_file_of_such_objects_is_read_as_a_log(tmp_path):
    lines = [json.dumps(trl(n, step=n, step_time=12.5)) for n in range(1, 41)]
    document = parsed(tmp_path / "metrics.jsonl", "\n".join(lines) + "\n")
    assert document["engine"] == "hf_trainer" and document["status"] == "ok"
    assert document["step_time_s"]["median"] == pytest.approx(12.5, rel=1e-4)
    assert document["tokens_per_s"] == pytest.approx(280_752 / 12.5, rel=1e-4)


def test_what_llama_factory_prints_is_read_without_its_mean_rate():
    text = "{'loss': 1.2345, 'learning_rate': 1.0e-04, 'epoch': 0.10, 'throughput': 9123.45}\n"
    steps = check(text * 3).steps()
    assert steps["loss"] == pytest.approx([1.2345] * 3)
    assert not steps.known("tokens_per_s_per_device")
