"""NeMo Automodel's lines and its file of objects."""

from __future__ import annotations

import json

import pytest

from paceline.core.units import GIB
from paceline.engines import log_format
from tests.engines.promises import parsed, reader_of

# After recipes/llm/train_ft.py and components/loggers/metric_logger.py of NVIDIA-NeMo/Automodel,
# 2025-2026; the lines of experiment details after recipes/base_recipe.py.
LOGGER = "2026-05-06 13:47:27 | INFO | root | "
WORLD = f"{LOGGER}Experiment_details:\n{LOGGER}- World size: 16\n"


def line(step: int, tps: float = 11_278.56, loss: str = "0.6974") -> str:
    return (
        f"{LOGGER}step {step} | epoch 0 | loss {loss} | grad_norm 1.5436 | lr 1.00e-05 | "
        f"mem 24.90 GiB | tps {tps:.2f}({tps / 8:.2f}/gpu) | num_label_tokens 21541\n"
    )


def record(step: int, tokens: int = 32_768, tps: float = 13_107.2, **more: object) -> str:
    metrics = {
        "step": step,
        "epoch": 0,
        "timestamp": "2026-05-06T13:47:27.123Z",
        "loss": 0.6974,
        "grad_norm": 1.5436,
        "lr": 1e-5,
        "mem": 24.9,
        "tps": tps,
        "tps_per_gpu": tps / 8,
        "num_tokens_per_step": tokens,
        "num_label_tokens": 21_541,
    }
    return json.dumps(metrics | more) + "\n"


check = reader_of("automodel")


def test_a_line_is_read_to_its_figures():
    log = check(line(9))
    steps = log.steps()
    assert steps.index.tolist() == [9]
    assert steps["loss"] == pytest.approx([0.6974])
    assert steps["grad_norm"] == pytest.approx([1.5436])
    assert steps["allocated_bytes"] == pytest.approx([24.9 * GIB])
    assert steps["tokens_per_s_per_device"] == pytest.approx([1409.82])
    assert not steps.known("step_time_s")
    assert "of a data-parallel rank" in log.remarks[0]


def test_with_a_world_size_the_rate_is_of_every_device():
    log = check(WORLD + line(9))
    assert log.facts["num_devices"] == 16
    assert log.steps()["tokens_per_s_per_device"] == pytest.approx([11_278.56 / 16])
    assert log.remarks == []


def test_the_file_has_the_tokens_of_a_step_and_so_its_time():
    text = record(9) + record(10, tokens=16_384)
    assert log_format("automodel").step_line.search(text.encode())
    steps = check(text).steps()
    assert steps.index.tolist() == [9, 10]
    assert steps["tokens"].tolist() == [32_768.0, 16_384.0]
    assert steps["step_time_s"] == pytest.approx([2.5, 1.25])
    assert steps["grad_norm"] == pytest.approx([1.5436] * 2)


def test_recipes_that_print_the_time_itself():
    text = (
        f"{LOGGER}step 9 | epoch 0 | loss 0.6974 | grad_norm 1.5436 | lr 1.00e-05 | "
        "mem 24.90 GiB | time 2.53s\n"
    )
    assert log_format("automodel").step_line.search(text.encode())
    log = check(text)
    assert log.steps()["step_time_s"] == pytest.approx([2.53])
    assert log.resolution_s == pytest.approx(0.01)


def test_validations_are_no_steps():
    text = f'{LOGGER}[val] name "x" | step 9 | epoch 0 | loss 0.5 | lr 1.00e-05 | num 3\n'
    text += '{"step": 9, "epoch": 0, "timestamp": "2026-05-06T13:47:27.123Z", "val_loss": 0.5}\n'
    assert check(line(9) + text + line(10)).steps().index.tolist() == [9, 10]


def test_the_figures_of_a_whole_file(tmp_path):
    document = parsed(tmp_path / "training.jsonl", "".join(record(n) for n in range(30)))
    assert document["engine"] == "automodel" and document["status"] == "ok"
    assert document["step_time_s"]["median"] == pytest.approx(2.5, rel=1e-4)
    assert document["tokens_per_s"] == pytest.approx(13_107.2, rel=1e-4)


def test_a_loss_that_is_no_number_is_told(tmp_path):
    assert parsed(tmp_path / "a.log", line(1) + line(2, loss="nan"))["status"] == "nan"
    text = record(1) + record(2, loss=float("nan"))
    assert parsed(tmp_path / "a.jsonl", text)["status"] == "nan"
