"""A run with bound ranks says where each of them ran, and what that did to the figures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.core.result import Result
from paceline.files.documents import write_text
from paceline.files.events import StartEvent
from paceline.runs.outcome import evaluate
from tests.files.test_events import START, lines
from tests.runs.example import write_run
from tests.runs.test_flow import only_run, start


def bound_run(runs: Path, bind: str) -> tuple[list[StartEvent], Result]:
    """The start lines and the result of a short run here."""
    process = start(runs, "--bind", bind, "--set", "steps=30", "--json", "--devices", "2")
    out, err = process.communicate(timeout=240)
    assert process.returncode in (0, 4), err  # 4: too few steady steps on a busy machine
    files = sorted(only_run(runs).glob("steps/rank-*.jsonl"))
    begun = [StartEvent.model_validate_json(file.read_text().splitlines()[0]) for file in files]
    return begun, Result.model_validate(json.loads(out))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_of_a_real_run_keep_to_cores_of_their_own(tmp_path: Path):
    begun, result = bound_run(tmp_path, "auto")
    first, second = (set((event.cores or "").split(",")) for event in begun)
    assert first and second and not first & second
    assert [event.bound and event.bound.by for event in begun] == ["cpu", "cpu"]
    assert [(rank.cores, rank.bound) for rank in result.ranks] == [(b.cores, True) for b in begun]
    assert not [warning for warning in result.warnings if "cores" in warning and "rank" in warning]


def test_a_real_run_takes_the_cores_that_a_file_names_and_tells_of_the_shared_one(tmp_path: Path):
    core = min(os.sched_getaffinity(0))
    (tmp_path / "cores").write_text(f"0 {core}\n1 {core}\n")
    begun, result = bound_run(tmp_path / "runs", str(tmp_path / "cores"))
    assert [event.cores for event in begun] == [str(core)] * 2
    assert any("cores are used by several bound ranks" in warning for warning in result.warnings)


def started(folder: Path, *changes: dict[str, Any]) -> None:
    """Give the ranks of a written run other start lines."""
    for rank, change in enumerate(changes):
        path = folder / "steps" / f"rank-{rank:05d}.jsonl"
        _, *steps = path.read_text().splitlines(keepends=True)
        begun = {**START, "rank": rank, "world_size": 2, **change}
        write_text(path, "".join([*lines(begun), *steps]))


def test_a_log_from_before_cores_were_told_has_none(tmp_path: Path):
    result = evaluate(write_run(tmp_path, "old")).result
    assert [(rank.cores, rank.bound) for rank in result.ranks] == [(None, None)] * 2


def test_unbound_ranks_on_several_numa_nodes_are_told_of(tmp_path: Path):
    folder = write_run(tmp_path, "loose")
    started(folder, *[{"cores": "0-63", "numa_nodes": 2, "threads": 8}] * 2)
    result = evaluate(folder).result
    assert any("--bind auto keeps each near its device" in warning for warning in result.warnings)
    assert [(rank.cores, rank.bound) for rank in result.ranks] == [("0-63", False)] * 2


def test_a_binding_that_failed_is_told_with_the_ranks(tmp_path: Path):
    failed = {"by": None, "threads": 1, "why": "setting the CPU affinity failed: no"}
    folder = write_run(tmp_path, "failed")
    started(folder, *[{"cores": "0-1", "bound": failed}] * 2)
    warnings = evaluate(folder).result.warnings
    assert any(warning.startswith("ranks 0, 1 were not bound") for warning in warnings), warnings


@pytest.mark.parametrize("cores", ["0-", "a", "1;2", "0-3,", "\n"])
def test_a_start_line_with_other_cores_is_not_believed(cores: str):
    with pytest.raises(ValueError, match="cores"):
        StartEvent.model_validate({**START, "cores": cores})
