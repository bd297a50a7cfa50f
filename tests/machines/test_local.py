"""The local launcher runs what it shows, and leaves no process behind, whatever ends the job."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.machines import local
from tests.machines.ranks import exit_code, rank_pids, wait_gone
from tests.waiting import wait_until

RANK = """
import os, sys, time
open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
print("hello from", os.environ["RANK"])
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]) if os.environ["RANK"] == "0" else 0)
"""

STUBBORN = """
import ctypes, os, signal, time
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as the trainer does: die with the launcher
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
time.sleep(120)
"""


def make_job(program: str = RANK, *arguments: str, **fields: object) -> Job:
    return Job(
        name="test",
        python=sys.executable,
        program=("rank.py", *arguments),
        files={"rank.py": program},
        devices_per_node=2,
        **fields,  # type: ignore[arg-type]
    )


def start(job: Job, folder: Path) -> local.LocalRun:
    local.prepare(job, folder)
    return local.submit(job, folder)


def test_the_script_on_disk_is_the_rendered_text_byte_for_byte(tmp_path: Path):
    job = make_job(RANK, "0", "0")
    run = start(job, tmp_path)
    assert (tmp_path / "job.sh").read_text() == local.render(job)
    assert exit_code(run) == 0


def test_the_script_runs_by_hand_from_any_folder(tmp_path: Path):
    local.prepare(make_job(RANK, "0", "0"), tmp_path)
    done = subprocess.run(
        ["bash", str(tmp_path / "job.sh")], cwd="/", capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(rank_pids(tmp_path)) == 2


def test_the_script_names_no_folder_of_the_run(tmp_path: Path):
    assert str(tmp_path) not in local.render(make_job(RANK, "0", "0"))


def test_ranks_learn_how_long_a_collective_may_take():
    job = replace(make_job(RANK, "0", "0"), collective_limit_s=1200.0)
    assert "export PACELINE_COLLECTIVE_LIMIT_S=1200\n" in local.render(job)


def test_hostile_values_stay_words():
    job = make_job(RANK, "$(touch /tmp/x)", env={"A": "'; rm -rf /; '", "B": "a b"})
    script = local.render(job)
    checked = subprocess.run(
        ["bash", "-c", script.replace("exec ", "printf '%s\\n' ").replace("cd --", "true")],
        capture_output=True,
        text=True,
    )
    assert "$(touch /tmp/x)" in checked.stdout.splitlines()


@pytest.mark.parametrize(
    "name", ["A;touch /tmp/owned;B", "A B", "1A", "A\n", "A[$(id)]", "", "\u00c4"]
)
def test_a_variable_that_bash_would_read_as_something_else_is_refused(name: str):
    with pytest.raises(ValueError, match="cannot name an environment variable"):
        local.render(make_job(env={name: "x"}))
    with pytest.raises(ValidationError, match="cannot name an environment variable"):
        Cluster(name="x", device="cpu", devices_per_node=1, env={"A_1": "x", name: "x"})


def test_a_newline_in_the_name_cannot_leave_the_comment():
    job = Job(name="x\ntouch /tmp/owned", python="python3", program=("a.py",))
    assert "\ntouch" not in local.render(job)


def test_a_failing_rank_fails_the_job(tmp_path: Path):
    assert exit_code(start(make_job(RANK, "0", "7"), tmp_path)) != 0


@pytest.mark.skipif(sys.platform != "linux", reason="the guard needs /proc")
def test_every_handle_of_a_job_holds_the_guard_whose_end_is_that_of_the_job(tmp_path: Path):
    @dataclass
    class Named(local.LocalRun):
        name: str = ""

    with pytest.raises(TypeError, match="guard"):
        local.LocalRun(Mock(), None)  # pyright: ignore[reportCallIssue]
    job = make_job(RANK, "600", "0")
    local.prepare(job, tmp_path)
    run = local.start(job, tmp_path, None, partial(Named, name="a"))
    try:
        wait_until(lambda: len(rank_pids(tmp_path)) == 2, "both ranks")
        gc.collect()
        assert run.guard is not None and run.guard.poll() is None and run.poll() is None
        (guard := run.guard).stdin.close()
        run.guard = None
        wait_until(lambda: run.process.poll() is not None, "the end of the job")
        guard.wait()
    finally:
        run.stop(0.1)


def test_stop_ends_ranks_that_ignore_sigterm(tmp_path: Path):
    run = start(make_job(STUBBORN), tmp_path)
    pids = rank_pids(tmp_path)
    run.poll()
    run.stop(grace_s=0.5)
    wait_gone([*pids, run.process.pid])


def test_a_second_interrupt_ends_ranks_that_ignore_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = start(make_job(STUBBORN), tmp_path)
    pids = rank_pids(tmp_path)
    wait = run.process.wait

    def interrupted(seconds: float | None = None) -> int:
        monkeypatch.setattr(run.process, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(run.process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.stop()
    wait_gone([*pids, run.process.pid])


def test_a_machine_that_cannot_resolve_its_own_name_runs_too(tmp_path: Path):
    renamed = ["unshare", "--uts", "bash", "-c", 'hostname nowhere.invalid && exec bash "$0"']
    try:
        able = subprocess.run([*renamed, "/dev/null"], capture_output=True).returncode == 0
    except OSError:
        able = False
    if not able:
        pytest.skip("this user may not rename a machine of its own")
    local.prepare(make_job(RANK, "0", "0"), tmp_path)

    script = str(tmp_path / local.SCRIPT_FILE)
    done = subprocess.run([*renamed, script], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0 and done.stdout.count("hello from") == 2, done.stderr


def test_a_time_limit_is_noticed(tmp_path: Path):
    run = start(make_job(RANK, "60", "0", timeout_s=0.2), tmp_path)
    time.sleep(0.3)
    assert run.timed_out
    run.stop()
    assert run.process.returncode is not None


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's parent-death signal")
def test_killing_the_controller_ends_the_ranks(tmp_path: Path):
    controller = tmp_path / "controller.py"
    controller.write_text(
        "import sys, time; from pathlib import Path\n"
        "from tests.machines.test_local import RANK, make_job, start\n"
        f"start(make_job(RANK, '100', '0'), Path({str(tmp_path)!r}))\n"
        "time.sleep(120)\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, str(controller)], env={**os.environ, "PYTHONPATH": str(root)}
    )
    pids = rank_pids(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's parent-death signal")
def test_a_job_whose_controller_died_before_it_could_ask_ends_at_once():
    program = (
        "import os, signal, time\n"
        "from paceline.files.programs import die_with_parent\n"
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    while os.getppid() == parent:\n"
        "        time.sleep(0.01)\n"
        "    print('orphaned', flush=True)\n"
        "    die_with_parent(parent, signal.SIGTERM)\n"
        "    print('still there', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("orphaned\n", "")
