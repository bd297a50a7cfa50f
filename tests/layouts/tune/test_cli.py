"""`paceline tune`, really run on this machine with models of milliseconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.tune import exit_code
from paceline.core.layout import Layout
from paceline.layouts.sweep.result import ExpectedStepTime
from paceline.layouts.tune.result import TuneResult, TuneRow
from tests.cli.test_errors import paceline
from tests.runs.test_flow import SMALL
from tests.waiting import wait_until

QUICK = ["tune", "tiny-llama", "--gpus", "2", *SMALL, "--set", "layout.micro_batch=4"]
TRIALS = ["--steps", "30", "--max-cp", "1"]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A tuning of three trials: runs folder, JSON, standard error."""
    runs = tmp_path_factory.mktemp("runs")
    done = paceline(
        *QUICK,
        *TRIALS,
        "--budget",
        "3 trials",
        "--save-recipe",
        str(runs / "fast.yaml"),
        "--json",
        runs=runs,
    )
    assert done.returncode == 0, done.stderr
    return runs, json.loads(done.stdout), done.stderr


def test_three_trials_end_with_a_best_layout(tuned: tuple[Path, dict[str, Any], str]):
    _, document, progress = tuned
    assert (
        document["num_runs"] == 3
        and document["stop"] in ("budget", "bound")
        and document["took_s"] > 0
    )
    first, *_ = document["rows"]
    assert first["own"] and first["layout"]["micro_batch"] == 4
    # A machine in use may leave too few steady steps.
    assert {row["status"] for row in document["rows"]} <= {"ok", "incomplete"}
    good = [row for row in document["rows"] if row["status"] == "ok"]
    best = min(good, key=lambda row: row["step_time_s"])
    assert best["best"] and best["tokens_per_s"] == pytest.approx(16 * 64 / best["step_time_s"])
    assert best["memory_bytes"] > 0 and len(document["effects"]) > 3
    assert "expected (" in progress and "layouts can run" in progress


def test_the_written_recipe_is_one_that_runs(tuned: tuple[Path, dict[str, Any], str]):
    runs, document, _ = tuned
    done = paceline("run", str(runs / "fast.yaml"), "--dry-run", runs=runs)
    assert done.returncode == 0, done.stderr
    text = (runs / "fast.yaml").read_text()
    assert text.startswith("# ") and "steps: 60" in text  # the recipe's own, not a trial's
    assert document["recipe_file"] == str(runs / "fast.yaml")


def test_the_same_command_runs_nothing_again(tuned: tuple[Path, dict[str, Any], str]):
    runs, document, _ = tuned
    before = sorted(runs.glob("*/run.json"))
    done = paceline(*QUICK, *TRIALS, "--budget", "3 trials", "--format", "md", runs=runs)
    assert done.returncode == 0 and "3 earlier runs" in done.stderr
    assert sorted(runs.glob("*/run.json")) == before
    for row in document["rows"]:
        assert f"| {row['label']} |" in done.stdout
    assert "- best: " in done.stdout and "not tried:" in done.stdout


def test_a_dry_run_runs_nothing(tmp_path: Path):
    done = paceline(*QUICK, *TRIALS, "--budget", "10m", "--dry-run", "--json", runs=tmp_path)
    assert done.returncode == 0 and not list(tmp_path.glob("*/run.json"))
    document = json.loads(done.stdout)
    assert (
        document["rows"] == []
        and document["n_layouts"] > 20
        and len(document["untried_layouts"]) > 0
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--gpus", "2"], 1, "needs --budget"),
        (["--gpus", "2", "--budget", "ten"], 1, "is not a budget"),
        (["--budget", "10m"], 1, "--gpus"),
        (["--gpus", "2", "--budget", "10m", "--device", "H100"], 1, "is not a device to run on"),
        (["--gpus", "3", "--budget", "10m", "--nodes", "2"], 1, "is not a multiple of the 2 hosts"),
        (["--gpus", "64", "--budget", "10m"], 1, "physical cores"),
        (["--gpus", "8", "--estimate-only"], 1, "--device"),
    ],
)
def test_wrong_input_is_refused(tmp_path: Path, arguments: list[str], code: int, message: str):
    done = paceline("tune", "tiny-llama", *arguments, runs=tmp_path)
    assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("option", "mode"),
    [
        (["--budget", "10m"], "--estimate-only"),
        (["--steps", "5"], "--estimate-only"),
        (["--save-recipe", "fast.yaml"], "--estimate-only"),
        (["--oversubscribe"], "--estimate-only"),
        (["--software", "softmax"], "--budget"),
        (["--per-node", "4"], "--budget"),
        (["--top", "3"], "--budget"),
    ],
)
def test_an_option_that_a_mode_would_pass_over_is_refused_by_name(
    tmp_path: Path, option: list[str], mode: str
):
    ranked = ["--device", "H100", "--estimate-only"]
    words = ranked if mode == "--estimate-only" else ["--budget", "1 run", "--dry-run"]
    done = paceline("tune", "tiny-llama", "--gpus", "2", *words, *option, runs=tmp_path)
    assert done.returncode == 1
    assert f"{option[0]}: has no effect with {mode}; leave it out" in done.stderr


def test_a_cluster_of_another_size_than_was_asked_for_is_refused(tmp_path: Path):
    (tmp_path / "c.yaml").write_text(
        "name: c\ndevice: cpu\ndevices_per_node: 2\nnodes: 2\nlauncher: ssh\nhosts: [a, b]\n"
    )
    words = [
        "tune",
        "tiny-llama",
        "--cluster",
        str(tmp_path / "c.yaml"),
        "--budget",
        "1 run",
        "--gpus",
    ]
    done = paceline(*words, "6", runs=tmp_path)
    assert done.returncode == 1 and "--gpus 6: " in done.stderr and "has 4 devices" in done.stderr
    assert paceline(*words, "4", "--dry-run", runs=tmp_path).returncode == 0


def test_ctrl_c_ends_the_running_trial_and_says_how_to_go_on(tmp_path: Path):
    environment = {**os.environ, "PACELINE_RUNS": str(tmp_path)}
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "paceline",
            *QUICK,
            "--steps",
            "100000",
            "--budget",
            "9 trials",
            "--json",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    wait_until(lambda: list(tmp_path.glob("*/steps/*.jsonl")), "step lines", limit_s=120)
    process.send_signal(signal.SIGINT)
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.terminate()  # a shell may have started the tests with SIGINT ignored
    document = json.loads(output)
    assert process.returncode == 4, errors
    assert (
        document["stop"] == "interrupted" and document["rows"] == [] and "Traceback" not in errors
    )
    assert document["resume_command"].startswith("paceline tune tiny-llama")


def outcome(stop: str, *statuses: str) -> TuneResult:
    hoped = ExpectedStepTime(step_time_s=1.0, low_s=0.9, high_s=1.1)
    rows = tuple(
        TuneRow.model_validate(
            {
                "number": n,
                "layout": Layout(),
                "label": "dp 1",
                "dp": 1,
                "status": status,
                "num_runs": 1,
                "before": hoped,
                "expected": hoped,
                "after": hoped,
                "best": status == "ok",
            }
        )
        for n, status in enumerate(statuses, start=1)
    )
    return TuneResult.model_validate(
        {
            "name": "t",
            "recipe": "r",
            "device": "cpu",
            "devices": 1,
            "oversubscribed": False,
            "budget": "9 trials",
            "num_runs": len(rows),
            "took_s": 1.0,
            "n_layouts": 9,
            "n_infeasible": 0,
            "n_pruned": 0,
            "n_dominated": 0,
            "n_hopeful": 0,
            "stop": stop,
            "rows": rows,
            "evidence": "e",
        }
    )


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (outcome("bound", "ok", "oom"), 0),
        (outcome("interrupted", "ok"), 4),
        (outcome("exhausted", "refused"), 1),
        (outcome("exhausted", "incomplete"), 4),
        (outcome("exhausted", "oom", "failed"), 2),
    ],
)
def test_the_exit_code_says_whether_there_is_an_answer(result: TuneResult, code: int):
    assert exit_code(result) == code
