"""Rank files that contradict the run: no result with status ok is computed from them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.runs.outcome import evaluate
from tests.attacks.fields import RUNS

GOOD = "2026-01-15-tiny-llama-good-dp2-2xcpu-7a10b1a2"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUNS / GOOD, tmp_path / GOOD))


def edited(old: str, new: str) -> Callable[[Path], None]:
    def edit(steps: Path) -> None:
        for path in steps.glob("rank-*.jsonl"):
            text, count = re.subn(old, new, path.read_text())
            assert count, path
            path.write_text(text)

    return edit


EDITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "lost": (lambda steps: (steps / "rank-00001.jsonl").unlink(), "that of rank 1 is missing"),
    "copied": (
        lambda steps: shutil.copy(steps / "rank-00001.jsonl", steps / "rank-00002.jsonl"),
        "rank 2 was written by rank 1",
    ),
    "tokens": (edited(r'"tokens": (\d+)\.0', r'"tokens": \g<1>0.0'), "tokens, but its samples"),
    "times": (edited(r'"step_time_s": 0\.', '"step_time_s": 0.00'), "of which it was busy"),
    "losses": (edited(r'"loss": [0-9.]+', '"loss": NaN'), "no step has a finite loss"),
    "end": (
        edited('"event": "end", "status": "ok"', '"event": "end", "status": "failed"'),
        "rank 0 ended as failed",
    ),
    "world size": (edited('"world_size": 2', '"world_size": 4'), "step files state 4"),
    "parameters": (edited('"num_parameters": 1', '"num_parameters": 2'), "parameters, but"),
}


def test_the_run_itself_is_ok(run: Path) -> None:
    assert evaluate(run).result.status == "ok"


@pytest.mark.parametrize("name", EDITS)
def test_a_contradiction_is_a_failure_with_its_reason(run: Path, name: str) -> None:
    edit, words = EDITS[name]
    edit(run / "steps")
    result = evaluate(run).result
    assert result.status == "failed" and words in (result.reason or ""), result.reason


def test_a_run_of_fewer_devices_is_a_failure(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    record["spec"]["cluster"]["devices_per_node"] = 1
    (run / "run.json").write_text(json.dumps(record))
    result = evaluate(run).result
    assert result.status == "failed" and "has 1 rank" in (result.reason or ""), result.reason
