"""NVIDIA's recipes of today on a real Slurm, by a program that stands in for llmb-run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.run_report import RunReport
from paceline.runs import flow
from paceline.runs.plan import Plan, make_plan
from tests.clusters.bed import Bed
from tests.clusters.foreign_jobs import lose, on_site, request, with_variable, words
from tests.clusters.slurm_jobs import Background
from tests.engines.test_nemo_llmb import installed
from tests.waiting import wait_until

SITE = """\
name: bed
device: GB300
nodes: 2
devices_per_node: 4
launcher: slurm
slurm: {partition: batch}
"""


@pytest.fixture
def bed(slurm_cluster: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bed:
    return on_site(slurm_cluster, monkeypatch, tmp_path)


def plan_of(folder: Path, *overrides: str) -> Plan:
    """Llama 3.1 8B on two nodes of four."""
    (folder / "site.yaml").write_text(SITE)
    settings = {"form": "llmb", "llmb_install": str(installed(folder, "gb300"))}
    asked = words(settings, "engine=nemo", "layout.cp=1", *overrides)
    return make_plan(request(folder, "llama31-8b", None, asked))


def run(plan: Plan, folder: Path) -> RunReport:
    return flow.run(plan, folder / "runs", ["test"], lambda _: None, probe=False)


def test_what_llmb_run_submits_is_followed_to_its_result(bed: Bed, tmp_path: Path) -> None:
    report = run(plan_of(tmp_path), tmp_path)
    result, folder = report.result, Path(report.folder)
    assert (result.status, result.steps_done) == ("ok", 50), result.reason
    assert result.metrics["step_time_s"].value == pytest.approx(5.7)
    rate = result.metrics["tokens_per_s"].value
    assert rate == pytest.approx(8192 * 128 / 5.7, rel=1e-3)
    (seen,) = tmp_path.glob("llmb/workloads/pretrain_llama3.1/experiments/*/*/*/seen.json")
    assert json.loads(seen.read_text())["env"]["GBS"] == "128"
    logs = folder / "experiment"
    assert not logs.is_symlink() and sorted(path.name[:4] for path in logs.iterdir()) == [
        *("log-", "sbat")
    ]


def test_a_job_of_llmb_run_that_hangs_ends_with_the_runs_time(bed: Bed, tmp_path: Path) -> None:
    plan = with_variable(plan_of(tmp_path, "time_limit_s=8"), "HANGS")
    result = run(plan, tmp_path).result
    assert (result.status, result.steps_done) == ("timeout", 20), result.reason
    assert result.reason == "the time limit of 8 s passed"
    wait_until(lambda: not bed.slurm.jobs(), "the end of the job")


def test_a_job_of_llmb_run_that_loses_a_node_says_which(bed: Bed, tmp_path: Path) -> None:
    running = Background(run, with_variable(plan_of(tmp_path), "HANGS"), tmp_path)
    wait_until(lambda: list(tmp_path.glob("runs/*/slurm.json")), "the job")
    (record,) = tmp_path.glob("runs/*/slurm.json")
    logs = "runs/*/experiment/log-*.out"
    last = f"iteration {20:8d}/"
    wait_until(lambda: any(last in log.read_text() for log in tmp_path.glob(logs)), "its steps", 60)
    wait_until(lambda: "RUNNING" in record.read_text(), "the run to hear of it")
    lose(bed, "node-002")
    result = running.result().result
    assert result.status == "failed" and str(result.reason).endswith("lost a node: node-002")
    assert result.steps_done == 20
