"""Processes and temporary files after every end, a kill included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest

import paceline
from paceline.files.temporary_locks import PREFIX
from tests.logs.example import megatron_log
from tests.nightly import NIGHTLY
from tests.surroundings import own_folders
from tests.terminals import exit_code_in_closed_terminal

SESSION = """
import pathlib, sys, time
from paceline.machines.ssh.session import Session
session = Session("n1", ["sleep", "600"])
session.start()
pathlib.Path(sys.argv[1]).write_text(str(session.process.pid))
time.sleep(600)
"""
PROGRAM = """
import pathlib, sys
from paceline.files.programs import run_program
write = 'import os,sys,time; open(sys.argv[1], "w").write(str(os.getpid())); time.sleep(600)'
run_program([sys.executable, "-c", write, sys.argv[1]])
"""


def _wait_for(condition: object, limit_s: float = 30) -> bool:
    end_at = time.monotonic() + limit_s
    while time.monotonic() < end_at:
        if condition():  # pyright: ignore
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("program", [SESSION, PROGRAM], ids=["ssh", "program"])
def test_no_ssh_and_no_short_program_outlives_its_parent(tmp_path: Path, program: str):
    file = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", program, str(file)])
    try:
        assert _wait_for(lambda: file.exists() and file.read_text())
        child = int(file.read_text())
        assert psutil.pid_exists(child)
    finally:
        process.kill()
        process.wait()
    assert _wait_for(lambda: not psutil.pid_exists(child)), "the process outlived its parent"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_closed_terminal_leaves_no_temporary_file(tmp_path: Path, number: signal.Signals):
    folder = tmp_path / "tmp"
    folder.mkdir()
    env = {**os.environ, "TMPDIR": str(folder), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "paceline", "probe", "gemm", "--no-cache"]
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        text=True,
    )
    assert _wait_for(lambda: any(folder.iterdir()), 60)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert not list(folder.iterdir())


def test_a_run_in_a_closed_terminal_is_incomplete(tmp_path: Path):
    """Its progress and its report can no longer be written."""
    program = (
        "import time\nfor n in range(1, 600):\n"
        "    print(f'step {n} loss: 3.0 step_time: 0.1', flush=True); time.sleep(0.1)"
    )
    code = exit_code_in_closed_terminal(
        ["-m", "paceline", "run", "--", sys.executable, "-c", program],
        {**os.environ, **own_folders(tmp_path)},
        lambda: any(b"step 5 " in path.read_bytes() for path in tmp_path.glob("*/logs/*")),
    )
    assert code == 4
    (result,) = tmp_path.glob("*/result.json")
    assert '"status": "cancelled"' in result.read_text()


def test_the_next_command_removes_what_a_killed_one_left(tmp_path: Path):
    folder = tmp_path / "tmp"
    folder.mkdir()
    program = (
        "import time\nfrom paceline.files.temporary import replaced_file, temporary_folder\n"
        "with temporary_folder() as folder, replaced_file(folder.parent / 'a'):\n"
        "    (folder / 'file').touch()\n    time.sleep(600)"
    )
    env = {**os.environ, "TMPDIR": str(folder)}
    begin = "import pathlib, sys; from paceline.files.temporary_locks import remove_abandoned; "
    remove = [sys.executable, "-c", f"{begin}remove_abandoned(pathlib.Path(sys.argv[1]))", folder]
    process = subprocess.Popen([sys.executable, "-c", program], env=env)
    try:
        assert _wait_for(lambda: list(folder.glob("paceline-tmp-*/file")))
        time.sleep(1.1)
        subprocess.run(remove, check=True)
        assert len(list(folder.iterdir())) == 2, "a folder in use was removed"
    finally:
        process.kill()
        process.wait()
    (folder / "paceline-of-the-user").mkdir()
    assert len(list(folder.iterdir())) == 3
    subprocess.run(remove, check=True)
    assert [path.name for path in folder.iterdir()] == ["paceline-of-the-user"]


def test_ignored_hangups_stay_ignored(tmp_path: Path):
    program = (
        "import signal\nfrom paceline.core.interrupts import install_handlers\n"
        "install_handlers()\nassert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
while os.path.exists(sys.argv[1]):
    time.sleep(0.1)
"""
"""A program that ignores SIGTERM, with a child that has become one of init."""


@pytest.mark.parametrize(
    "number",
    [None, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL] if NIGHTLY else [None, signal.SIGKILL],
    ids=lambda number: str(number),
)
def test_no_program_of_a_run_outlives_it(tmp_path: Path, number: signal.Signals | None):
    """The run ends by itself, by a signal, or is killed."""
    (tmp_path / "program.py").write_text(STUBBORN)
    file = tmp_path / "pids"
    command = [sys.executable, "-m", "paceline", "run", "--", sys.executable]
    process = subprocess.Popen(
        [*command, str(tmp_path / "program.py"), str(file)],
        env={**os.environ, **own_folders(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        assert _wait_for(lambda: file.exists() and len(file.read_text().splitlines()) == 2, 120)
        pids = [int(line) for line in file.read_text().splitlines()]
        if number is None:
            family = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
            os.kill(next(pid for pid in pids if pid in family), signal.SIGKILL)
        else:
            process.send_signal(number)
        process.wait(120)
        ended = _wait_for(lambda: not any(map(psutil.pid_exists, pids)), 60)
    finally:
        process.kill()
        process.wait()
        file.unlink(missing_ok=True)
    assert ended, "a process outlived its run"


NAMED = ("mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory")
OWN_WAY = {
    "files/temporary.py": "makes files",
    "files/temporary_locks.py": "makes folders",
    "machines/ssh/connection.py": "removes what killed processes left, by their number",
    "mlperf/check/checker_program.py": "is in a temporary folder of the package",
}


def test_every_temporary_file_with_a_name_is_removed_by_the_next_process():
    package = Path(paceline.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(f"{name}(" in path.read_text() for name in NAMED)
    }
    assert {name for name in found if not name.startswith("trainer/")} == set(OWN_WAY)


@pytest.mark.parametrize("place", ["runs", "temporary"])
def test_what_a_killed_import_left_is_removed_by_the_next_one(tmp_path: Path, place: str):
    """An import has a hidden folder among the runs, and one for the members of an archive."""
    folder, archive = tmp_path / "tmp", tmp_path / "logs.tar"
    folder.mkdir()
    runs = tmp_path / "runs"
    with tarfile.open(archive, "w") as file:
        (tmp_path / "a.log").write_text(megatron_log([1.0, 1.1, 1.2, 1.1, 1.0]))
        file.add(tmp_path / "a.log", "a.log")
    program = (
        "import pathlib, sys, time\n"
        "from paceline.files.temporary import temporary_folder\n"
        "parent = pathlib.Path(sys.argv[1]) if sys.argv[1] else None\n"
        "with temporary_folder(parent) as folder:\n"
        "    (folder / 'file').touch(); print('there', flush=True); time.sleep(600)"
    )
    runs.mkdir()
    env = {**os.environ, **own_folders(runs), "TMPDIR": str(folder)}
    parent = str(runs) if place == "runs" else ""
    command = [sys.executable, "-c", program, parent]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    process.kill()
    process.communicate()
    left = runs if place == "runs" else folder
    assert len([path for path in left.iterdir() if PREFIX in path.name]) == 1
    time.sleep(1.1)

    words = ["runs", "import", str(archive), "--model", "tiny-gpt", "--seq-len", "256"]
    words += ["--gpus", "8", "--device", "H100"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words], env=env, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert [path for path in (*runs.iterdir(), *folder.iterdir()) if PREFIX in path.name] == []
