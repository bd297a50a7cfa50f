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
from tests.example import make_spec
from tests.runs.example import write_run

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


def without(number: int) -> Callable[[Path], None]:
    """Remove one line of rank 1."""

    def edit(steps: Path) -> None:
        path = steps / "rank-00001.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        del lines[number]
        path.write_text("".join(lines))

    return edit


EDITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "lost": (lambda steps: (steps / "rank-00001.jsonl").unlink(), "file of rank 1 is missing"),
    "copied": (
        lambda steps: shutil.copy(steps / "rank-00001.jsonl", steps / "rank-00002.jsonl"),
        "rank 2 was written by rank 1",
    ),
    "tokens": (edited(r'"tokens": (\d+)\.0', r'"tokens": \g<1>0.0'), "has 5,120 tokens in 512"),
    "fewer tokens": (edited(r'"tokens": 512', '"tokens": 256'), "has 256 tokens in 512 positions"),
    "samples": (
        edited(r'"tokens": 512\.0, "samples": 8\.0', '"tokens": 5120.0, "samples": 80.0'),
        "has 160 samples of length 64, but the recipe has a global batch of 16",
    ),
    "times": (edited(r'"step_time_s": 0\.', '"step_time_s": 0.00'), "s, but was busy 0."),
    "losses": (edited(r'"loss": [0-9.]+', '"loss": NaN'), "step 1 has no finite loss"),
    "end": (
        edited('"event": "end", "status": "ok"', '"event": "end", "status": "failed"'),
        "rank 0 ended as failed",
    ),
    "no end": (without(-1), "rank 1 has no end line"),
    "no start": (without(0), "rank 1 has no start line"),
    "one step fewer": (without(9), "but its end line states"),
    "world size": (edited('"world_size": 2', '"world_size": 4'), "rank 0 states 4"),
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


def test_a_program_that_logs_on_one_rank_is_ok_with_a_warning(tmp_path: Path) -> None:
    spec = make_spec(engine="command", command=("train",))
    folder = write_run(tmp_path, "run", spec=spec)
    whole = evaluate(folder).result
    (folder / "steps/rank-00001.jsonl").unlink()
    result = evaluate(folder).result

    assert (whole.status, result.status) == ("ok", "ok")
    assert not [w for w in whole.warnings if "step files" in w]
    assert "step files of 1 rank of 2: tokens and samples of the others are missing" in (
        result.warnings
    )


def test_a_copied_file_of_a_program_is_a_failure(tmp_path: Path) -> None:
    spec = make_spec(engine="command", command=("train",))
    folder = write_run(tmp_path, "run", spec=spec)
    third = folder / "steps/rank-00002.jsonl"
    third.write_text((folder / "steps/rank-00001.jsonl").read_text().replace('k": 1', 'k": 2'))
    result = evaluate(folder).result

    assert result.status == "failed"
    assert result.reason == "rank 2 has a step file, but the run has 2 ranks"
