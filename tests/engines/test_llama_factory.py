"""LLaMA-Factory's file of objects, and its terminal, which is Hugging Face Trainer's."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paceline.core.units import GIB
from tests.engines.promises import parsed, reader_of


# After LogCallback of src/llamafactory/train/callbacks.py of hiyouga/LLaMA-Factory, 2024-2026.
def line(step: int, clock: str, total_s: float | None = None, **more: object) -> str:
    record: dict[str, object] = {
        "current_steps": step,
        "total_steps": 1000,
        "loss": 1.2345,
        "lr": 1e-4,
        "epoch": 0.1,
        "percentage": round(step / 10, 2),
        "elapsed_time": clock,
        "remaining_time": "1 day, 2:03:04",
    }
    if total_s is not None:
        record |= {
            "throughput": round(65_536 * step / total_s, 2),
            "total_tokens": 65_536 * step,
        }
    return json.dumps(record | more) + "\n"


check = reader_of("llama_factory")


def test_whole_seconds_are_shared_by_the_steps_between():
    log = check(line(10, "0:00:25") + line(20, "0:00:50") + line(30, "0:01:16"))
    steps = log.steps()
    assert steps.index.tolist() == [10, 20, 30] and log.facts["total_steps"] == 1000
    assert np.isnan(steps["step_time_s"][0])
    assert steps["step_time_s"][1:] == pytest.approx([2.5, 2.6])
    assert steps["loss"] == pytest.approx([1.2345] * 3)
    assert log.resolution_s == pytest.approx(0.1)


def test_tokens_over_their_mean_rate_are_a_finer_clock():
    text = line(10, "0:00:25", 25.4) + line(20, "0:00:50", 50.9) + line(30, "0:01:16", 76.35)
    log = check(text)
    steps = log.steps()
    assert steps["step_time_s"][1:] == pytest.approx([2.55, 2.545], rel=1e-4)
    assert steps["tokens"][1:].tolist() == [65_536.0] * 2
    assert not steps.known("tokens_per_s_per_device"), "the rate is a mean since the beginning"
    assert log.resolution_s < 0.001


def test_days_of_the_clock_count():
    log = check(line(10, "23:59:50") + line(20, "1 day, 0:00:20"))
    assert log.steps()["step_time_s"][1] == pytest.approx(3.0)


def test_hours_of_the_clock_count():
    log = check(line(10, "1:59:50") + line(20, "2:00:20") + line(30, "12:00:20"))
    assert log.steps()["step_time_s"][1:].tolist() == pytest.approx([3.0, 3600.0])


def test_evaluations_and_the_end_are_no_steps():
    evaluation = '{"current_steps": 20, "total_steps": 1000, "eval_loss": 1.1, "epoch": 0.2, '
    evaluation += '"percentage": 2.0, "elapsed_time": "0:00:55", "remaining_time": "0:07:30"}\n'
    end = '{"current_steps": 1000, "total_steps": 1000, "epoch": 1.0, "percentage": 100.0, '
    end += '"elapsed_time": "0:50:00", "remaining_time": "0:00:00"}\n'
    log = check(line(10, "0:00:25") + line(20, "0:00:50") + evaluation + end)
    assert log.steps().index.tolist() == [10, 20]
    assert log.end_line is not None


def test_memory_is_kept():
    text = line(10, "0:00:25", vram_allocated=54.25, vram_reserved=61.5)
    steps = check(text).steps()
    assert steps["allocated_bytes"] == pytest.approx([54.25 * GIB])
    assert steps["reserved_bytes"] == pytest.approx([61.5 * GIB])


def test_another_run_appended_to_the_file_begins_anew():
    runs = [
        line(n, f"0:0{n // 120}:{(n // 2) % 60:02d}") for n in range(10, 210, 10)
    ]  # language: allow
    log = check("".join(runs * 2))
    times = log.steps()["step_time_s"]
    assert np.flatnonzero(np.isnan(times)).tolist() == [0, 20]
    assert times[1:20] == pytest.approx([0.5] * 19)
    assert "start over" in log.remarks[0]


def test_its_terminal_is_hugging_face_trainers(tmp_path):
    terminal = "{'loss': 1.2345, 'learning_rate': 1.0000e-04, 'epoch': 0.10, 'throughput': 9.5}\n"
    assert parsed(tmp_path / "a.log", terminal * 9)["engine"] == "hf_trainer"
