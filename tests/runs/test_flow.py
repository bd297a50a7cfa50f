"""Real runs on this machine, end to end, and every way in which a run can end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.core.errors import SystemFaultError
from paceline.files.run_folder import LOGS_FOLDER, REPORT_FILE, RESULT_FILE, STEPS_FOLDER
from paceline.machines.placement import Request
from paceline.runs import flow
from paceline.runs.plan import make_plan
from tests.cli.test_errors import paceline
from tests.surroundings import own_folders
from tests.waiting import wait_until

SMALL_SETTINGS = (
    *("model.num_layers=1", "model.hidden_size=64", "model.ffn_size=128"),
    *("seq_len=64", "dtype=fp32", "global_batch=16"),
)
SMALL = [word for setting in SMALL_SETTINGS for word in ("--set", setting)]


def start(runs: Path, *arguments: str) -> subprocess.Popen[str]:
    """`paceline run tiny-llama` by two ranks in the background, also where there is one core."""
    environment = {**os.environ, **own_folders(runs)}
    words = ["run", "tiny-llama", "--no-probe", "--devices", "2", *SMALL, *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def only_run(runs: Path) -> Path:
    (folder,) = [path.parent for path in runs.glob("*/run.json")]
    return folder


def trainer_pids(runs: Path, count: int, folder: str = "*") -> list[int]:
    """The ranks' process ids, once both have written more than `count` steps; empty before."""
    files = sorted(runs.glob(f"{folder}/{STEPS_FOLDER}/rank-*.jsonl"))
    texts = [file.read_text() for file in files]
    if len(texts) < 2 or any(text.count('{"event": "step"') <= count for text in texts):
        return []
    return [json.loads(text.splitlines()[0])["pid"] for text in texts]


def wait_for_steps(runs: Path, count: int) -> list[int]:
    """Wait until both ranks have written more than `count` steps; the ranks' process ids."""
    return wait_until(lambda: trainer_pids(runs, count), f"{count} steps", 300)


def assert_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), f"the end of {pids}", 120)


def result_of(runs: Path) -> dict[str, Any]:
    return json.loads(paceline("runs", "show", "last", "--json", runs=runs).stdout)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One real run of 40 steps with two ranks: (runs folder, what --json printed)."""
    runs = tmp_path_factory.mktemp("runs")
    options = ["--set", "steps=40", "--devices", "2", "--tag", "first", "--json"]
    done = paceline("run", "tiny-llama", *SMALL, *options, runs=runs)
    assert done.returncode == 0, done.stderr
    return runs, json.loads(done.stdout)


def test_json_stands_alone_and_says_how_fast(finished: tuple[Path, dict[str, Any]]):
    _, result = finished
    assert result["status"] == "ok" and result["steps_done"] == 40
    tokens = result["metrics"]["tokens_per_s"]
    assert tokens["value"] > 0 and tokens["unit"] == "tokens/s" and tokens["n"] >= 5
    # A disturbed machine may leave too few steady steps for an interval.
    assert tokens["n"] < 20 or tokens["low"] <= tokens["value"] <= tokens["high"]
    assert 0 < result["metrics"]["achievable_fraction"]["value"] < 1.5
    assert result["window"]["n"] == tokens["n"]


def test_the_folder_holds_everything(finished: tuple[Path, dict[str, Any]]):
    runs, result = finished
    names = {str(p.relative_to(runs / result["run"])) for p in (runs / result["run"]).rglob("*")}
    assert {
        "run.json",
        "job.sh",
        "trainer.json",
        "inventory.json",
        RESULT_FILE,
        REPORT_FILE,
        "steps.jsonl",
        f"{STEPS_FOLDER}/rank-00001.jsonl",
        f"{LOGS_FOLDER}/rank-00000.log",
        "trainer/__main__.py",
    } <= names


def test_the_loss_falls_on_real_text(finished: tuple[Path, dict[str, Any]]):
    runs, result = finished
    lines = (runs / result["run"] / "steps.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0] - 0.5


def test_ranks_see_different_data_and_the_same_steps(finished: tuple[Path, dict[str, Any]]):
    _, result = finished
    assert [r["rank"] for r in result["ranks"]] == [0, 1]
    assert result["metrics"]["samples_per_s"]["value"] * result["metrics"]["step_time_s"][
        "value"
    ] == pytest.approx(16)


def test_show_computes_the_same_figures_from_the_files(finished: tuple[Path, dict[str, Any]]):
    runs, result = finished
    assert result_of(runs)["metrics"] == result["metrics"]
    assert json.loads((runs / result["run"] / RESULT_FILE).read_text()) == result


def test_the_run_is_listed_and_found_by_its_tag(finished: tuple[Path, dict[str, Any]]):
    runs, result = finished
    rows = json.loads(paceline("runs", "list", "--json", runs=runs).stdout)
    assert rows[-1]["run"] == result["run"] and rows[-1]["status"] == "ok"
    assert "tokens/s" in paceline("runs", "show", "first", runs=runs).stdout


@pytest.mark.parametrize("form", ["text", "csv", "md", "html"])
def test_the_report_comes_in_every_form(finished: tuple[Path, dict[str, Any]], form: str):
    runs, result = finished
    done = paceline("runs", "show", result["run"], "--format", form, runs=runs)
    assert done.returncode == 0 and "tokens" in done.stdout
    assert "\x1b[" not in done.stdout


def test_charts_are_saved_as_pictures(finished: tuple[Path, dict[str, Any]]):
    runs, _ = finished
    done = paceline("runs", "report", "last", "--charts", "svg,png", runs=runs)
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert all(path.stat().st_size > 0 for path in paths)
    assert {path.suffix for path in paths} == {".svg", ".png", ".html"}


def test_what_the_dry_run_printed_is_what_ran(finished: tuple[Path, dict[str, Any]]):
    runs, result = finished
    dry = paceline("run", "tiny-llama", *SMALL, "--set", "steps=40", "--devices", "2", "--dry-run")
    assert (runs / result["run"] / "job.sh").read_text() == dry.stdout


def test_a_diverging_run_ends_as_nan(tmp_path: Path):
    process = start(tmp_path, "--set", "lr=1e30", "--set", "grad_clip=0", "--set", "steps=60")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 2, errors
    result = result_of(tmp_path)
    assert result["status"] == "nan" and result["verdict"]["kind"] == "invalid"
    assert "Traceback" not in output + errors


def test_a_broken_corpus_is_a_reason_and_not_a_stack_trace(tmp_path: Path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "well"}\n{"nothing": 1}\n')
    process = start(tmp_path, "--set", "data.source=jsonl", "--set", f"data.path={corpus}")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    result = result_of(tmp_path)
    assert (
        result["status"] == "failed"
        and "corpus.jsonl:2: the record has no text" in result["reason"]
    )
    assert "Traceback" not in output + errors and "corpus.jsonl:2" in output


def test_a_corpus_is_found_from_the_current_folder(tmp_path: Path):
    (tmp_path / "corpus.txt").write_text("to be or not to be " * 5000)
    environment = {**os.environ, "PACELINE_RUNS": "here", "XDG_CACHE_HOME": str(tmp_path)}
    options = [
        *("--no-probe", "--json", "--set", "steps=60"),
        *("--set", "data.source=text", "--set", "data.path=corpus.txt"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "tiny-llama", *SMALL, *options],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "ok"


def test_a_time_limit_ends_the_run_and_keeps_the_steps(tmp_path: Path):
    settings = ("--set", "steps=1000000", "--set", "compile=none")
    for limit_s in (20, 60, 180):  # a busy machine may need the first for the start alone
        runs = tmp_path / str(limit_s)
        process = start(runs, "--timeout", str(limit_s), *settings)
        process.communicate(timeout=300)
        result = result_of(runs)
        assert process.returncode == 2 and result["status"] == "timeout"
        if result["steps_done"] >= 3:
            break
    assert result["steps_done"] >= 3
    assert_gone(wait_for_steps(runs, 2))


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_process_and_is_recorded(tmp_path: Path, which: signal.Signals):
    process = start(tmp_path, "--set", "steps=1000000", "--set", "compile=none", "--json")
    pids = wait_for_steps(tmp_path, 10)
    checkpoints = only_run(tmp_path) / "checkpoints"
    for name in ("step-000004/state.json", ".step-000008/__0_0.distcp"):
        (checkpoints / name).parent.mkdir(parents=True)
        (checkpoints / name).touch()
    process.send_signal(which)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 4 and "Traceback" not in errors
    assert json.loads(output)["status"] == "cancelled"
    assert_gone(pids)
    result = result_of(tmp_path)
    assert result["status"] == "cancelled" and result["steps_done"] >= 10
    assert (only_run(tmp_path) / REPORT_FILE).exists()
    assert [path.name for path in checkpoints.iterdir()] == ["step-000004"]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemFaultError("run.json", "no room")])
def test_what_has_no_record_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
):
    def write(path: Path, value: object) -> None:
        raise fault

    plan = make_plan(Request("tiny-gpt", device="cpu", devices_per_node=1))
    monkeypatch.setattr("paceline.runs.flow.write_value", write)
    with pytest.raises((KeyboardInterrupt, SystemFaultError)):
        flow.run(plan, tmp_path, ["test"], lambda _: None, probe=False)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_controller_leaves_an_incomplete_run_and_no_orphans(tmp_path: Path):
    process = start(tmp_path, "--set", "steps=1000000", "--set", "compile=none")
    pids = wait_for_steps(tmp_path, 10)
    process.kill()
    process.communicate(timeout=60)
    assert_gone(pids)
    result = result_of(tmp_path)
    assert result["status"] == "incomplete" and result["steps_done"] >= 10
    assert (
        json.loads(paceline("runs", "list", "--json", runs=tmp_path).stdout)[0]["status"]
        == "incomplete"
    )


def test_a_killed_rank_is_a_failed_run(tmp_path: Path):
    process = start(tmp_path, "--set", "steps=1000000", "--set", "compile=none")
    pids = wait_for_steps(tmp_path, 3)
    os.kill(pids[1], signal.SIGKILL)
    process.communicate(timeout=120)
    result = result_of(tmp_path)
    assert process.returncode == 2 and result["status"] == "failed"
    assert result["reason"] == "rank 1 was killed by SIGKILL"
    assert_gone(pids)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """Runs of which one rank or both were stopped: (runs folder, seconds until they ended)."""
    runs = {name: tmp_path_factory.mktemp(name) for name in ("one", "both")}
    settings = ("--set", "steps=1000000", "--set", "compile=none", "--set", "hang_limit_s=4")
    processes = {name: start(folder, *settings) for name, folder in runs.items()}
    pids = {name: wait_for_steps(folder, 5) for name, folder in runs.items()}
    began = time.monotonic()
    for pid in (pids["one"][1], *pids["both"]):
        os.kill(pid, signal.SIGSTOP)
    stopped_files: dict[str, tuple[Path, float]] = {}
    for name, process in processes.items():
        process.communicate(timeout=180)
        stopped_files[name] = runs[name], time.monotonic() - began
        assert process.returncode == 2
        assert_gone(pids[name])
    return stopped_files


@pytest.mark.parametrize(
    ("which", "reason"),
    [("one", "rank 1"), ("both", "no rank showed activity")],
)
def test_a_job_that_stands_still_ends_by_itself_and_leaves_all_stacks(
    stopped: dict[str, tuple[Path, float]], which: str, reason: str
):
    runs, seconds = stopped[which]
    result, folder = result_of(runs), only_run(runs)
    assert seconds < 120
    assert result["status"] == "failed" and reason in result["reason"]
    page = (folder / REPORT_FILE).read_text()
    assert "Stack trace at the end: " in page and page.count("most recent call first") >= 2
    shown = paceline("runs", "show", "last", runs=runs).stdout
    assert all(f"{LOGS_FOLDER}/rank-{rank:05d}." in shown for rank in range(2))


def test_a_memory_limit_is_a_status_that_names_the_rank(tmp_path: Path):
    process = start(tmp_path, "--set", "memory_limit_bytes=5e6", "--set", "steps=20")
    process.communicate(timeout=120)
    result = result_of(tmp_path)
    assert (process.returncode, result["status"]) == (2, "oom"), result["reason"]
    assert "memory" in result["reason"]
    assert result["steps_done"] < 20


def test_running_out_of_memory_is_a_status(tmp_path: Path):
    """Address space is limited to what start-up needs and the step's activations exceed."""
    command = (
        "ulimit -v 12000000; exec "
        f"{sys.executable} -m paceline run tiny-llama --no-probe --force --devices 1 "
        "--set steps=20 --set seq_len=4096 --set global_batch=1024 --set layout.micro_batch=1024 "
        "--set dtype=fp32 --set model.hidden_size=1024 --set model.num_layers=8"
    )
    environment = {**os.environ, "PACELINE_RUNS": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=300
    )
    result = result_of(tmp_path)
    assert (done.returncode, result["status"]) == (2, "oom"), result["reason"]
    assert "memory" in result["reason"]


def test_an_index_that_cannot_be_written_costs_a_warning_and_not_the_run(tmp_path: Path):
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    environment = {**os.environ, "PACELINE_RUNS": str(tmp_path), "XDG_CACHE_HOME": str(blocked)}
    options = ["--set", "steps=60", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "tiny-llama", *SMALL, *options],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert any("index" in warning for warning in result["warnings"])
    assert result["metrics"]["achievable_fraction"]["value"] > 0
