"""Ctrl-C and SIGTERM at moments of the first seconds, when modules are loaded and a run begins.

PACELINE_INTERRUPTS says at how many moments; 400 of them take about ten minutes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

MOMENTS = int(os.environ.get("PACELINE_INTERRUPTS", "12"))
FIRST_SECONDS = 2.0
LIMIT_S = 120
SEED = 16
MARK = "PACELINE_TEST_MARK"
DRAWN = random.Random(SEED)
CASES = [
    ((signal.SIGINT, signal.SIGTERM)[number % 2], round(DRAWN.uniform(0, FIRST_SECONDS), 4))
    for number in range(MOMENTS)
]
SWALLOWING = """
import os, signal, time, weakref
from paceline.core import interrupts

class Something:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))

class Referred:
    pass

def in_a_callback(_):
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(1000))

interrupts.install_handlers()
try:
    {what}
    time.sleep(30)
    print("went on")
except KeyboardInterrupt:
    print("interrupted")
"""


def has_owner(pid: int) -> bool:
    """Whether the process has blocked SIGINT, or handles SIGTERM: from its first instruction on."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    fields = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Sig"))
    bits = {name: int(fields[name], 16) for name in ("SigBlk", "SigCgt")}
    return bool(
        bits["SigBlk"] >> (signal.SIGINT - 1) & 1 or bits["SigCgt"] >> (signal.SIGTERM - 1) & 1
    )


def marked(mark: str) -> list[int]:
    """Processes that have the mark in their environment."""
    pids: list[int] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                pids.append(process.pid)
        except psutil.Error:
            continue
    return pids


@pytest.mark.parametrize(("number", "after_s"), CASES, ids=lambda value: str(value))
def test_an_interrupt_of_the_first_seconds_ends_all_with_its_code(
    tmp_path: Path, number: signal.Signals, after_s: float
):
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "paceline", "run", "tiny-gpt", "--no-probe"),
            *("--devices", "1", "--set", "steps=2000"),
        ],
        env={
            **os.environ,
            MARK: mark,
            "PACELINE_RUNS": str(tmp_path / "runs"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Before the interpreter reads the first line of paceline there is nothing that could own it.
    while not has_owner(process.pid):
        assert process.poll() is None
        time.sleep(0.001)
    time.sleep(after_s)
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT_S)
    runs = tmp_path / "runs"
    folders = [entry for entry in runs.glob("*") if entry.is_dir()]
    # A run that had started is reported as cancelled; before that there is nothing to report.
    assert process.returncode == (4 if folders else 130), err
    for words in ("Traceback", "Exception ignored", "KeyboardInterrupt"):
        assert words not in out + err
    assert marked(mark) == []
    for folder in folders:
        record = json.loads((folder / "run.json").read_text())
        result = json.loads((folder / "result.json").read_text())
        assert record["status"] == result["status"] == "cancelled"


def test_an_interrupt_inside_text_that_is_executed_leaves_the_exit_code_alone(tmp_path: Path):
    (tmp_path / "program.py").write_text(
        "import os, signal, sys\n"
        "from paceline.core import interrupts\n"
        "interrupts.install_handlers()\n"
        "try:\n"
        "    exec('os.kill(os.getpid(), signal.SIGINT); sum(range(1000))')\n"
        "except KeyboardInterrupt:\n"
        "    interrupts.ignore_interrupts()\n"
        "    sys.exit(130)\n"
    )
    done = subprocess.run([sys.executable, "-m", "program"], cwd=tmp_path, timeout=LIMIT_S)
    assert done.returncode == 130


@pytest.mark.parametrize(
    "what",
    [
        "Something()",
        "referred = Referred(); kept = weakref.ref(referred, in_a_callback); del referred",
    ],
)
def test_an_interrupt_that_python_swallows_is_raised_again(what: str):
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWING.replace("{what}", what)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout == "interrupted\n" and done.stderr == ""
