"""Trainings from start to end, as the launcher starts them."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from paceline.files.events import EndEvent, MemoryEvent, StartEvent, StepEvent, read_events
from tests.trainer.example import end, lines, log, settings, steps, train

RANKS, STEPS = 2, 40


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks on the standard library's text, with gradient accumulation."""
    folder = tmp_path_factory.mktemp("training")
    raw = settings(RANKS, STEPS, source="stdlib", micro_batch=2, lr=3e-3, seq_len=64)
    assert train(folder, raw) == 0, log(folder)
    return folder


@pytest.mark.parametrize("rank", range(RANKS))
def test_every_line_is_an_event_that_the_harness_knows(finished: Path, rank: int) -> None:
    text = (finished / "steps" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
    events = list(read_events(text))

    assert [type(event) for event in events] == [
        StartEvent, StepEvent, MemoryEvent, *[StepEvent] * (STEPS - 1), EndEvent,
    ]  # fmt: skip
    assert [event.step for event in events if isinstance(event, StepEvent)] == [
        *range(1, STEPS + 1)
    ]
    assert end(finished, rank) | {"time_unix": 0} == {
        "event": "end", "status": "ok", "reason": None, "steps": STEPS, "time_unix": 0,
    }  # fmt: skip


def test_the_start_line_says_what_runs(finished: Path) -> None:
    start = lines(finished, rank=1)[0]

    assert start["schema"] == 1 and start["rank"] == start["local_rank"] == 1
    assert start["world_size"] == RANKS and start["backend"] == "gloo" and start["cuda"] is None
    assert start["num_parameters"] == settings()["expected_parameters"]
    assert start["layout"]["micro_batch"] == 2 and start["layout"]["num_microbatches"] == 2
    assert start["data"]["source"] == "stdlib"
    assert start["data"]["tokens"] == STEPS * 8 * 64 + 1
    assert start["threads"] == 1 and start["device_name"]


def test_ranks_add_up_to_the_global_batch(finished: Path) -> None:
    for one, other in zip(steps(finished, 0), steps(finished, 1), strict=True):
        assert one["samples"] + other["samples"] == one["global_batch"] == 8
        assert one["tokens"] + other["tokens"] == 8 * one["seq_len"]
        assert one["loss"] != other["loss"] and one["grad_norm"] == other["grad_norm"]


def test_times_add_up(finished: Path) -> None:
    for rank in range(RANKS):
        rows = steps(finished, rank)
        for row in rows:
            assert row["busy_time_s"] + row["comm_wait_s"] == pytest.approx(row["step_time_s"])
            assert 0 < row["busy_time_s"] <= row["step_time_s"]
            assert 0 <= row["data_wait_s"] < row["step_time_s"]
        start, final = lines(finished, rank)[0], end(finished, rank)
        lasted_s = final["time_unix"] - start["time_unix"]
        assert sum(row["step_time_s"] for row in rows) == pytest.approx(lasted_s, rel=0.3, abs=0.2)


def test_the_loss_falls_on_real_text(finished: Path) -> None:
    losses = [row["loss"] for row in steps(finished)]

    assert losses[0] == pytest.approx(math.log(320), rel=0.05)
    assert median(losses[-5:]) < 0.7 * losses[0]


def test_memory_is_a_growing_peak_of_a_known_kind(finished: Path) -> None:
    memory = [row["memory_bytes"] for row in steps(finished)]
    resident = [m["resident"] for m in memory]

    assert resident == sorted(resident) and resident[0] > 2**26
    assert all(m["allocated"] is None and m["reserved"] is None for m in memory)


def test_nothing_is_complained_about(finished: Path) -> None:
    for rank in range(RANKS):
        assert log(finished, rank) == ""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_print_nothing_and_end_well(tmp_path: Path, stage: int) -> None:
    raw = settings(RANKS, 8, source="synthetic", zero_stage=stage, dtype="bf16", recompute="full")

    assert train(tmp_path, raw) == 0, log(tmp_path)
    assert [end(tmp_path, rank)["status"] for rank in range(RANKS)] == ["ok", "ok"]
    assert log(tmp_path) == log(tmp_path, 1) == ""
    assert all(row["comm_wait_s"] > 0 for row in steps(tmp_path))


def sources(folder: Path) -> list[dict[str, Any]]:
    """Settings for a text, a jsonl and a token file that hold the same."""
    text = "All happy families are alike. " * 60
    (folder / "a.txt").write_text(text)
    (folder / "a.jsonl").write_text(f'{{"text": "{text}"}}\n')
    (folder / "a.bin").write_bytes(struct.pack(f"<{len(text)}H", *text.encode()))
    return [
        {"source": source, "path": str(folder / name)}
        for source, name in (("text", "a.txt"), ("jsonl", "a.jsonl"), ("tokens", "a.bin"))
    ]


def test_text_jsonl_and_tokens_train_alike_and_alone(tmp_path: Path) -> None:
    """One process, started without torchrun."""
    losses = []
    for data in sources(tmp_path):
        folder = tmp_path / data["source"]
        assert train(folder, settings(1, 3, **data)) == 0, log(folder)
        assert lines(folder)[0]["backend"] is None
        assert all(row["comm_wait_s"] == 0 for row in steps(folder))
        losses.append([row["loss"] for row in steps(folder)])

    assert losses[0] == losses[1] == losses[2]
