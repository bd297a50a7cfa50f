"""Memory over a step: what the trainer writes, and what is read of it."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.core.errors import UserError
from paceline.profiles.memory_curves import read, read_file
from paceline.profiles.profile import Profile
from paceline.runs.profile_report import memory_rows, profile_document
from paceline.trainer.config import ProfileConfig
from paceline.trainer.measure import memory_profiler
from paceline.trainer.measure.memory_profiler import (
    HighestPoints,
    MemoryProfiler,
    allocator_curve,
    downsample,
)
from paceline.trainer.parallel.mesh import World

GIB = float(2**30)


def record(**changes: Any) -> dict[str, Any]:
    """Two steps of a device; the peak is in the middle of the second."""
    return {
        "schema": 1,
        "rank": 3,
        "kind": "allocated",
        "steps": [20, 21],
        "edges_s": [100.0, 110.0, 120.0],
        "time_s": [99.0, 101.0, 105.0, 111.0, 115.0, 119.0],
        "bytes": [9 * GIB, 2 * GIB, 5 * GIB, 2 * GIB, 6 * GIB, 1 * GIB],
        "reserved_bytes": [9 * GIB, 8 * GIB, 8 * GIB, 8 * GIB, 8 * GIB, 8 * GIB],
    } | changes


def run_folder(folder: Path) -> Path:
    """A run whose rank 3 has such a record, and a step that was watched by part."""
    for name in ("profiles", "steps"):
        (folder / name).mkdir()
    (folder / "profiles" / "rank-3.memory.json").write_text(json.dumps(record()))
    event = {
        "event": "memory",
        "step": 2,
        "kind": "allocated",
        "tracker": "allocator",
        "parts_bytes": {"weights": GIB, "context": 0.5 * GIB},
        "at_peak_bytes": {"weights": GIB, "activations": 4 * GIB, "buffers": 0},
        "peak_bytes": {"allocated": 5 * GIB},
    }
    (folder / "steps" / "rank-00003.jsonl").write_text(json.dumps(event) + "\n")
    return folder


def test_a_peak_is_told_by_step_and_part_with_the_pools_empty_share(tmp_path: Path) -> None:
    profile = read(run_folder(tmp_path))
    (curve,) = profile.memory
    assert (curve.peak_bytes, curve.peak_step, curve.peak_at) == (6 * GIB, 21, 0.5)
    assert (curve.lowest_bytes, curve.fragmentation) == (GIB, 0.25)
    assert curve.parts_bytes == {"weights": GIB, "activations": 4 * GIB}
    assert curve.unexplained_bytes == GIB
    assert [point.at_s for point in curve.curve] == [1.0, 5.0, 9.0]
    assert [row["part"] for row in memory_rows(profile)] == [
        "activations",
        "weights",
        "not explained",
    ]
    figures = {figure.label: figure for figure in profile_document(profile, "it").figures}
    assert figures["Highest peak"].value == "6.00 GiB"
    assert figures["Highest peak"].details == ("allocated, rank 3", "step 21, 50%")
    assert figures["Fragmentation"].value == "25.0%"
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


@pytest.mark.parametrize(
    "changes",
    [{"bytes": [1.0]}, {"edges_s": [1.0]}, {"schema": 2}, {"time_s": []}, {"kind": "imagined"}],
)
def test_a_record_that_is_none_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "rank-0.memory.json"
    path.write_text(json.dumps(record(**changes)))
    with pytest.raises(UserError):
        read_file(path)


def test_a_file_that_is_no_curve_says_which_ones_are(tmp_path: Path) -> None:
    (path := tmp_path / "nccl.log").write_text("node:1:1 [0] NCCL INFO Bootstrap")
    for name in (path, tmp_path / "missing"):
        with pytest.raises(UserError, match=r"memory curve: .*allowed: .*rank-\*\.memory\.json"):
            read_file(name)


def test_a_run_without_curves_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no memory curve"):
        read(tmp_path)


def test_the_trainers_curve_of_a_cpu_holds_what_a_step_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gc.collect()
    world = World(0, 0, 1, torch.device("cpu"), None)
    profiler = MemoryProfiler(ProfileConfig("memory", [0], 2, 3), world)
    kept: list[torch.Tensor] = []
    for step in range(1, 5):
        profiler.before_step(step)
        if step == 3:
            kept.append(torch.ones(128 * 2**20))  # 512 MiB, written to
        profiler.after_step(step)
    profiler.close()
    (curve,) = read_file(tmp_path / "profiles" / "rank-0.memory.json").memory
    assert (curve.kind, curve.peak_step, curve.reserved_bytes) == ("resident", 3, None)
    # Earlier tests in this process leave memory that is returned while the steps run.
    assert curve.peak_bytes - curve.lowest_bytes > 256 * 2**20


def test_the_allocators_history_becomes_a_curve() -> None:
    history = [
        {"action": "segment_alloc", "size": 20, "time_us": 1e6},
        {"action": "alloc", "size": 8, "time_us": 2e6},
        {"action": "free_requested", "size": 8, "time_us": 3e6},
        {"action": "free_completed", "size": 8, "time_us": 4e6},
        {"action": "segment_free", "size": 20, "time_us": 5e6},
    ]
    curve = allocator_curve(history, (6.0, 100, 200), 0.0)
    assert curve == [
        (0.0, 100, 200),
        (1.0, 100, 220),
        (2.0, 108, 220),
        (4.0, 100, 220),
        (5.0, 100, 200),
        (6.0, 100, 200),
    ]
    assert downsample(curve, 2) == [(2.0, 108, 220), (4.0, 100, 220)]


def test_a_full_history_gives_the_end_of_the_curve_and_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of 8 was made before the entries that are left: its free must not go below 0."""
    entries = [
        {"action": "alloc", "size": 3, "time_us": 2e6},
        {"action": "free_completed", "size": 8, "time_us": 3e6},
        {"action": "alloc", "size": 1, "time_us": 4e6},
    ]
    memory = SimpleNamespace(
        _record_memory_history=lambda **_: None,
        _snapshot=lambda _: {"device_traces": [entries]},
        _dump_snapshot=lambda _: None,
    )
    monkeypatch.setattr(torch.cuda, "memory", memory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 4)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 20)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"active_bytes.all.current": 4})
    monkeypatch.setattr(memory_profiler, "MAX_ENTRIES", 3)
    monkeypatch.chdir(tmp_path)
    world = World(0, 0, 1, torch.device("cuda", 0), None)
    profiler = MemoryProfiler(ProfileConfig("memory", [0], 1, 1), world)
    profiler.before_step(1)
    profiler.after_step(1)
    path = tmp_path / "profiles" / "rank-0.memory.json"
    assert json.loads(path.read_text())["bytes"] == [11, 3, 4, 4]
    (warning,) = read_file(path).warnings
    assert "rank 0: the allocator's history keeps only its last 3 entries" in warning


def test_a_curve_of_any_length_takes_bounded_memory_and_keeps_its_peak() -> None:
    highest = HighestPoints(8)
    for moment in range(1000):
        highest.add((float(moment), 500 if moment == 77 else moment % 7, None))
    points = highest.points
    assert 4 <= len(points) <= 8
    assert max(points, key=lambda point: point[1]) == (77.0, 500, None)
    assert [point[0] // 128 for point in points] == [*range(8)]
