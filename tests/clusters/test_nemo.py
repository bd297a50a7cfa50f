"""NVIDIA's NeMo procedure on a real Slurm, with a program that stands in for NeMo's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from paceline.core.run_report import RunReport
from paceline.runs import flow
from paceline.runs.plan import Plan, make_plan
from tests.clusters.bed import Bed
from tests.clusters.foreign_jobs import lose, on_site, request, with_variable, words
from tests.clusters.slurm_jobs import Background
from tests.engines.batch_site import SYSTEM
from tests.waiting import wait_until

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
    (folder / "nvidia+nemo+24.09.sqsh").touch()
    named = {"script": script} if script else {}
    with (folder / "site.yaml").open("a") as site:
        site.write(f"env: {{SLURM_MPI_TYPE: none, PATH: '{programs}:{os.environ['PATH']}'}}\n")
    settings = words({"stage_path": str(folder), **named}, "engine=nemo", *overrides)
    return make_plan(request(folder, "llama31-8b", None, settings))


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


def test_nemo_that_hangs_ends_with_the_runs_time(bed: Bed, tmp_path: Path) -> None:
    plan = with_variable(plan_of(tmp_path, OWN_SCRIPT, "time_limit_s=8"), "HANGS")
    result = run(plan, tmp_path).result
    assert (result.status, result.steps_done) == ("timeout", 20), result.reason
    assert result.reason == "the time limit of 8 s passed"
    wait_until(lambda: not bed.slurm.jobs(), "the end of the job")


def test_nemo_that_loses_a_node_says_which(bed: Bed, tmp_path: Path) -> None:
    plan = with_variable(plan_of(tmp_path, RECIPES_SCRIPT), "HANGS")
    running = Background(run, plan, tmp_path)
    wait_until(lambda: list(tmp_path.glob("runs/*/slurm.json")), "the job")
    (record,) = tmp_path.glob("runs/*/slurm.json")
    wait_until(lambda: len(list(tmp_path.glob("runs/**/seen-*.json"))) == 4, "the ranks to run", 60)
    wait_until(lambda: "RUNNING" in record.read_text(), "the run to hear of it")
    lose(bed, "node-002")
    result = running.result().result
    assert result.status == "failed" and str(result.reason).endswith("lost a node: node-002")
