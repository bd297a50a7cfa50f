"""Batch scripts of somebody else on a real Slurm: submitted as they are, followed to the result."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.run_report import RunReport
from paceline.machines.slurm import client
from paceline.mlperf.score.run_set import score
from paceline.runs import flow, outcome
from paceline.runs.plan import make_plan
from tests.clusters.bed import Bed
from tests.clusters.foreign_jobs import on_site, request, with_variable, words
from tests.clusters.slurm_jobs import Background
from tests.engines.batch_site import CONFIG, MLPERF, SYSTEM
from tests.waiting import wait_until


@pytest.fixture
def bed(slurm_cluster: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bed:
    return on_site(slurm_cluster, monkeypatch, tmp_path)


def paceline(bed: Bed, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.run(command, env=bed.env, capture_output=True, text=True, timeout=200)


def test_trials_run_a_submissions_own_script_and_are_scored(bed: Bed, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    settings = {name: MLPERF[name] for name in ("config", "container")}
    command = [
        *("mlperf", "run", "llama31-8b", "--engine", "mlperf", "--json", "--name", "series"),
        *("--cluster", str(tmp_path / "site.yaml"), "--runs-dir", str(runs), "--data", "/data"),
        *(word for text in words(settings) for word in ("--set", text)),
    ]
    done = paceline(bed, *command, "--trials", "1")
    assert done.returncode == 0, done.stderr
    done = paceline(bed, *command, "--trials", "2")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    trials = answer["series"]["trials"]
    assert [(trial["seed"], trial["status"]) for trial in trials] == [
        (1, "success"),
        (2, "success"),
    ]
    assert [trial["last_loss"] for trial in trials] == [3.29, 3.29]
    assert len(list(runs.glob("*/run.json"))) == 2, "the first trial was not run again"
    rows = score(Path(answer["folder"])).runs
    assert [(row.status, row.samples_to_target) for row in rows] == [
        ("success", 190_464),
        ("success", 202_752),
    ]

    folder = runs / trials[0]["run"]
    seen = [json.loads((folder / "results" / f"seen-{rank}.json").read_text()) for rank in range(4)]
    assert {entry["env"]["SLURMD_NODENAME"] for entry in seen} == {"node-001", "node-002"}
    env = seen[0]["env"]
    assert env["BED_CONTAINER_MOUNTS"] == f"{folder}/results:/results,/data:/data:ro"
    assert (env["SEED"], env["NEXP"], env["DGXSYSTEM"]) == ("1", "1", CONFIG[7:-3])
    assert env["STEPS_BETWEEN"] == "two words" and seen[0]["cwd"] == str(SYSTEM)
    assert (folder / "batch" / "run.sub").read_bytes() == (SYSTEM / "run.sub").read_bytes()
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "ok" and result["steps_done"] == 40
    assert 0.5 < result["metrics"]["step_time_s"]["value"] < 0.51


def test_one_job_runs_all_trials(bed: Bed, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    settings = {"config": MLPERF["config"], "container": MLPERF["container"], "nexp": 10}
    done = paceline(
        bed,
        *("mlperf", "run", "llama31-8b", "--engine", "mlperf", "--json", "--name", "series"),
        *("--cluster", str(tmp_path / "site.yaml"), "--runs-dir", str(runs), "--data", "/data"),
        *(word for text in words(settings) for word in ("--set", text)),
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    trials = answer["series"]["trials"]
    assert [(trial["seed"], trial["status"]) for trial in trials] == [
        (seed, "success") for seed in range(1, 11)
    ]
    assert len({trial["run"] for trial in trials}) == 1 and len(list(runs.glob("*/run.json"))) == 1
    samples = [run.samples_to_target for run in score(Path(answer["folder"])).runs]
    assert samples == [178_176 + 12_288 * (seed % 3) for seed in range(1, 11)]


def test_a_trial_outlives_its_controller(bed: Bed, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    settings = {"config": MLPERF["config"], "container": MLPERF["container"]}
    command = [
        *(sys.executable, "-m", "paceline", "mlperf", "run", "llama31-8b", "--engine", "mlperf"),
        *("--json", "--name", "series", "--trials", "2", "--runs-dir", str(runs)),
        *("--cluster", str(tmp_path / "site.yaml"), "--data", "/data"),
        *(word for text in words(settings) for word in ("--set", text)),
    ]

    with (tmp_path / "site.yaml").open("a") as site:
        site.write("env: {LASTS: '6'}\n")

    def seen() -> list[Path]:
        return sorted(runs.glob("*/results/seen-0.json"))

    controller = subprocess.Popen(command, env=bed.env, stderr=subprocess.DEVNULL)
    try:
        wait_until(seen, "the first trial to run")
    finally:
        controller.kill()
        controller.wait()
    (first,) = (path.parents[1] for path in seen())
    (job,) = bed.slurm.jobs()
    assert client.job_with_output(first) == job
    done = subprocess.run(command, env=bed.env, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["series"]["trials"]
    assert [trial["status"] for trial in trials] == ["success", "success"]
    assert trials[0]["run"] == first.name and len(seen()) == 2, "each seed was queued once"
    assert json.loads((first / "run.json").read_text())["status"] == "ok"
    assert [path.name for path in first.glob("slurm-*.log")] == [f"slurm-{job}.log"]


def test_a_script_that_fails_or_is_cancelled_leaves_its_end(bed: Bed, tmp_path: Path) -> None:
    plan = make_plan(
        request(tmp_path, "llama31-8b", "mlperf-trial", words(MLPERF, "engine=mlperf"))
    )

    def run(variable: str, stopped: Callable[[], bool] = bool) -> RunReport:
        chosen = with_variable(plan, variable)
        root = tmp_path / variable
        return flow.run(chosen, root, ["test"], lambda _: None, probe=False, is_cancelled=stopped)

    result = run("FAILS").result
    assert result.status == "oom" and "CUDA out of memory" in str(result.reason)
    assert result.steps_done == 40

    stop = threading.Event()
    running = Background(run, "HANGS", stop.is_set)
    wait_until(lambda: list((tmp_path / "HANGS").glob("*/results/seen-3.json")), "the ranks to run")
    assert len(bed.slurm.jobs()) == 1
    stop.set()
    with pytest.raises(flow.CancelledRunError):
        running.result()
    wait_until(lambda: not bed.slurm.jobs(), "the job to be cancelled")
    (file,) = (tmp_path / "HANGS").glob("*/run.json")
    assert outcome.evaluate(file.parent).result.status == "cancelled"
