"""NVIDIA's NeMo procedure on a real Slurm, with a program that stands in for NeMo's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from paceline.core.run_report import RunReport
from paceline.engines.nemo.launch import staged_pieces
from paceline.runs import flow
from paceline.runs.plan import Plan, make_plan
from tests.clusters.bed import Bed
from tests.clusters.foreign_jobs import on_site, request, words
from tests.engines.batch_site import SYSTEM

RECIPE = SYSTEM.parent / "nemo_recipe"
OWN_SCRIPT, RECIPES_SCRIPT = None, str(RECIPE / "launch.sh")


@pytest.fixture
def bed(slurm_cluster: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bed:
    return on_site(slurm_cluster, monkeypatch, tmp_path)


def plan_of(folder: Path, script: str | None, *overrides: str) -> Plan:
    """Llama 3.1 8B with a python3 in the path that runs the fake."""
    programs = folder / "programs"
    programs.mkdir()
    fake = f'#!/bin/sh\nshift 2\nexec {sys.executable} {RECIPE}/program.py "$@"\n'
    (programs / "python3").write_text(fake)
    (programs / "python3").chmod(0o755)
    named = {"script": script} if script else {}
    with (folder / "site.yaml").open("a") as site:
        site.write(f"env: {{SLURM_MPI_TYPE: none, PATH: '{programs}:{os.environ['PATH']}'}}\n")
    settings = words({"stage_path": str(folder), **named}, "engine=nemo", *overrides)
    plan = make_plan(request(folder, "llama31-8b", None, settings))
    for piece in staged_pieces(plan.spec):
        piece.path.parent.mkdir(parents=True, exist_ok=True)
        if not piece.path.exists():
            piece.path.touch()
    return plan


def run(plan: Plan, folder: Path) -> RunReport:
    return flow.run(plan, folder / "runs", ["test"], lambda _: None, probe=False)


@pytest.mark.parametrize("script", [OWN_SCRIPT, RECIPES_SCRIPT])
def test_nemo_runs_to_its_result(bed: Bed, tmp_path: Path, script: str | None) -> None:
    report = run(plan_of(tmp_path, script), tmp_path)
    result, folder = report.result, Path(report.folder)
    assert result.status == "ok" and result.steps_done == 50
    assert result.metrics["step_time_s"].value == pytest.approx(5.01)
    rate = result.metrics["tokens_per_s"].value
    assert rate == pytest.approx(8192 * 64 / 5.01, rel=1e-3)
    place = folder / "results" / "25.01" / "bf16" / "8b" / "4"
    seen = [json.loads((place / f"seen-{rank}.json").read_text()) for rank in range(4)]
    assert {entry["env"]["SLURMD_NODENAME"] for entry in seen} == {"node-001", "node-002"}
    assert seen[0]["env"]["BED_CONTAINER_IMAGE"] == f"{tmp_path}/nvidia+nemo+24.09.sqsh"
    assert "model.global_batch_size=64" in seen[0]["argv"]
