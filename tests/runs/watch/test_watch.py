"""What is watched is what the ranks write, and watching changes nothing of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from paceline.files.documents import write_text
from paceline.files.events import read_rank
from paceline.files.run_folder import RUN_FILE, run_folders
from paceline.report.terminal import plain_text
from paceline.runs.watch.reader import RECENT, RunReader, WatchState
from paceline.runs.watch.report import snapshot_document, state_line
from tests.command import paceline
from tests.explain.example import STEPS, write_parts
from tests.explain.test_logs import write_log
from tests.waiting import wait_until

QUICK = ("steps=1000000", "compile=none", "seq_len=32", "model.num_layers=1", "batch_per_device=1",
         "layout.micro_batch=1", "memory_parts=false")  # fmt: skip
LIMIT_S = 120.0


def state_of(folder: Path) -> WatchState:
    return RunReader(folder).state()


def test_a_finished_run_shows_its_pace_beside_its_own_past(tmp_path: Path):
    folder = write_parts(tmp_path, "it", ({"data": 0.05}, {"work": 1.5, "comm": 0.02}))
    state = state_of(folder)
    lines = (folder / "steps/rank-00001.jsonl").read_text().splitlines()
    times = [s.step_time_s for s in read_rank(lines).steps]
    told = [t for t in times[1:] if t is not None]
    assert state.step_time_s is not None
    assert state.step_time_s == pytest.approx(median(told[-RECENT:]))
    assert state.usual_s == pytest.approx(median(told[:-RECENT]))
    assert (state.n, state.usual_n) == (RECENT, STEPS - 1 - RECENT)
    assert state.tokens_per_s and state.samples_per_s == pytest.approx(8 / state.step_time_s)
    assert state.data_wait_fraction == pytest.approx(0.05 / state.step_time_s)
    assert state.waited_for == 1 and state.waited_for_excess == pytest.approx(0.2, abs=0.05)
    assert state.eta_s is None and state.ended
    page = plain_text(snapshot_document(state))
    assert f"step {STEPS} of" in page and "the others wait for rank 1, which is" in page
    assert state_line(state).startswith(f"it · ok · step {STEPS} of {STEPS} · step ")


def test_telemetry_of_the_last_moment_is_shown(tmp_path: Path):
    folder = write_parts(tmp_path, "it")
    start = {"event": "telemetry", "schema_version": 1, "host": "h", "interval_s": 1.0,
             "sources": {"gpu": "nvidia-smi"}, "unknown": {}}  # fmt: skip
    samples = [
        {"event": "sample", "time_unix": time.time() - ago,
         "gpus": [{"index": i, "power_w": 300.0, "sm_clock_mhz": clock, "temperature_c": 60.0 + i}
                  for i in range(2)]}
        for ago, clock in ((2000, 1900.0), (5, 1200.0))
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in (start, *samples))
    write_text(folder / "telemetry" / "h.jsonl", text)
    devices = state_of(folder).devices
    assert devices is not None
    assert (devices.clock_mhz, devices.power_w, devices.hottest_c) == (1200.0, 600.0, 61.0)
    assert devices.age_s == pytest.approx(5, abs=60)


def test_a_running_training_is_watched_and_goes_on(tmp_path: Path):
    words = [word for setting in QUICK for word in ("--set", setting)]
    command = [sys.executable, "-m", "paceline", "run", "tiny-llama", "--no-probe", *words]
    run = subprocess.Popen(
        [*command, "--devices", "2", "--runs-dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        (folder,) = wait_until(lambda: run_folders(tmp_path), "the run folder", LIMIT_S)
        reader = RunReader(folder)

        def state_after_some_steps() -> WatchState | None:
            assert run.poll() is None
            state = reader.state()
            return state if (state.step or 0) >= 2 * RECENT else None

        state = wait_until(state_after_some_steps, "steps", LIMIT_S)
        assert state.status == "running" and len(state.ranks) == 2
        assert state.step_time_s and state.usual_s and state.eta_s and state.memory_bytes
        before = {path: path.read_bytes() for path in folder.glob("*.json")}
        told = json.loads(
            paceline("runs", "watch", "last", "--once", "--json", runs=tmp_path).stdout
        )
        assert told["run"] == folder.name and told["step"] >= state.step
        assert run.poll() is None
        assert before == {path: path.read_bytes() for path in folder.glob("*.json")}
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(LIMIT_S)
    assert state_of(folder).status == "cancelled"


def test_a_command_is_started_and_outlives_its_watcher(tmp_path: Path):
    program = tmp_path / "train.py"
    program.write_text("import time\nprint('working', flush=True)\ntime.sleep(60)\n")
    done = paceline(
        "runs", "watch", "--once", "--json", "--", sys.executable, program, runs=tmp_path / "runs"
    )
    assert done.returncode == 0, done.stderr
    state = json.loads(done.stdout)
    assert state["status"] in ("queued", "running") and state["step"] is None
    record = json.loads((tmp_path / "runs" / state["run"] / RUN_FILE).read_text())
    os.kill(record["controller"]["pid"], signal.SIGINT)


def test_who_asks_for_nothing_or_for_both_is_told(tmp_path: Path):
    for words in ([], ["it", "--", "true"]):
        done = paceline("runs", "watch", *words, runs=tmp_path)
        assert done.returncode == 1 and "either RUN or -- COMMAND" in done.stderr


def test_an_imported_log_is_not_watched(tmp_path: Path):
    log = write_log(tmp_path / "train.log", [2.0] * 20)
    assert paceline("runs", "import", str(log), runs=tmp_path / "runs").returncode == 0
    done = paceline("runs", "watch", "last", "--once", runs=tmp_path / "runs")
    assert done.returncode == 1 and "was imported from a log" in done.stderr
    assert "`paceline runs show" in done.stderr
