"""The native trainer under PyTorch's profiler, as `paceline probe profile` starts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.compare.comparability import compare_settings
from paceline.files.run_folder import read_record
from paceline.profiles.profile import PROFILE_FILE
from tests.command import paceline

SMALL = (
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.ffn_size=64",
    "training.seq_len=32",
    "training.batch_per_device=1",
    "training.dtype=fp32",
    "layout.micro_batch=1",
    "data.source=synthetic",
)


PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that spin while they wait would slow each other on a busy machine."""


@pytest.mark.parametrize(("devices", "more", "axis"), [(1, (), None), (2, ("layout.tp=2",), "tp")])
def test_a_profiled_step_is_taken_apart(
    tmp_path: Path, devices: int, more: tuple[str, ...], axis: str | None
) -> None:
    changes = [word for change in (*SMALL, "steps=9", *more) for word in ("--set", change)]
    asked = ["--device", "cpu", "--devices", str(devices), "--ranks", "all", "--steps", "7-8"]
    form = ["--no-probe", "--json"]
    answer = paceline(
        "probe", "profile", "tiny-llama", *changes, *asked, *form, runs=tmp_path, env=PATIENT
    )
    assert answer.returncode == 0, answer.stderr
    assert "the run has 18 steps (--set steps is ignored)" in answer.stderr
    profile = json.loads(answer.stdout)
    assert (profile["ranks"], profile["steps"]) == ([*range(devices)], [7, 8])
    parts = profile["parts"]
    hidden_s = parts["communication_overlapped"]
    assert sum(parts.values()) - hidden_s == pytest.approx(profile["step_time_s"], rel=0.02)
    assert parts["gemm"] > 0 and parts["attention"] > 0 and parts["optimizer"] > 0
    assert list(profile["axes"]) == ([axis] if axis else [])
    assert (parts["communication_exposed"] + hidden_s > 0) is (devices > 1)
    folder = tmp_path / profile["run"]
    assert json.loads((folder / PROFILE_FILE).read_text()) == profile
    _agrees_with_the_trainers_clock(folder, profile)
    assert profile["overhead"]["n_profiled"] == 2 and profile["overhead"]["n_plain"] > 5
    facts = read_record(folder).settings
    assert "profiled" in compare_settings([facts], [facts]).keys


def _agrees_with_the_trainers_clock(folder: Path, profile: dict[str, Any]) -> None:
    """A profiled step is as long as its event line says; a busy machine may part the two once."""
    lines = {
        (rank, line["step"]): line["step_time_s"]
        for rank in profile["ranks"]
        for line in _lines(folder / "steps" / f"rank-{rank:05d}.jsonl")
        if line.get("profiled")
    }
    traced = {(b["rank"], b["step"]): b["step_time_s"] for b in profile["breakdowns"]}
    assert lines.keys() == traced.keys()
    assert min(abs(lines[key] / traced[key] - 1) for key in lines) < 0.02


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_page_that_could_not_be_written_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    page = tmp_path / "nowhere" / "page.html"
    answer = paceline("probe", "profile", "tiny-llama", "--html", str(page), runs=tmp_path)
    assert answer.returncode == 1 and "is not a file in an existing folder" in answer.stderr
    assert not list(tmp_path.glob("*/run.json"))
