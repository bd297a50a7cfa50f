"""Ctrl-C, SIGTERM and SIGHUP at moments of the first seconds of a command, when modules are loaded
and its work begins.

PACELINE_INTERRUPTS says at how many moments; 400 of them take about ten minutes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from itertools import cycle, islice, product
from pathlib import Path

import psutil
import pytest

from paceline.core.interrupts import SIGNALS
from paceline.files.temporary_locks import PREFIX
from tests.attacks.reproductions import recipe_with, stored_run
from tests.logs.example import megatron_log
from tests.staging.mirror import Mirror, serving
from tests.surroundings import own_folders

MOMENTS = int(os.environ.get("PACELINE_INTERRUPTS", "15"))
VERBS = ("run", "parse", "report", "download", "convert")
FIRST_SECONDS = 2.0
LIMIT_S = 120
SEED = 16
MARK = "PACELINE_TEST_MARK"
DRAWN = random.Random(SEED)
CASES = [
    (verb, number, round(DRAWN.uniform(0, FIRST_SECONDS), 4))
    for verb, number in islice(cycle(product(VERBS, SIGNALS)), MOMENTS)
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


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """URL of a server whose one file begins and never ends."""
    mirror, released = Mirror(files={"/data/set": b"x" * 100_000}), threading.Event()
    mirror.fail("/data/set", *[("slow", released, 1000)] * 10_000)
    with serving(mirror):
        yield mirror.url
        released.set()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log that takes longer to read than the processor's share of the first seconds."""
    path = tmp_path_factory.mktemp("log") / "train.log"
    path.write_text(megatron_log([1.0, 1.1] * 100_000))
    return path


def prepared(verb: str, folder: Path, server: str, log: Path) -> list[object]:
    """The words of a command, after what it reads was made."""
    if verb == "parse":
        return ["parse", log, "--json"]
    if verb == "report":
        stored_run(folder / "runs")
        return ["runs", "report", "last", "--output", folder / "page.html"]
    if verb == "run":
        return ["run", "tiny-gpt", "--no-probe", "--devices", 1, "--set", "steps=2000"]
    asset = f"{{name: set, kind: url, source: {server}/data, files: [{{path: set}}]}}"
    assets = "assets:" if verb == "convert" else f"assets:\n  - {asset}"
    recipe = recipe_with(folder / "recipe.yaml", "assets:", assets)
    return ["recipes", "stage", recipe, "--to", folder / "stage"]


@pytest.mark.parametrize(("verb", "number", "after_s"), CASES, ids=str)
def test_an_interrupt_ends_all_with_its_code_and_one_line(
    tmp_path: Path, verb: str, number: signal.Signals, after_s: float, server: str, log: Path
):
    mark, temporary, runs = uuid.uuid4().hex, tmp_path / "tmp", tmp_path / "runs"
    temporary.mkdir()
    words = [str(word) for word in prepared(verb, tmp_path, server, log)]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words],
        env={**os.environ, **own_folders(runs), MARK: mark, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    # Before the interpreter reads the first line of paceline there is nothing that could own it.
    while not has_owner(process.pid):
        assert process.poll() is None
        time.sleep(0.001)
    time.sleep(after_s)
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT_S)
    for words in ("Traceback", "Exception ignored", "KeyboardInterrupt"):
        assert words not in out + err
    assert marked(mark) == []
    assert list(temporary.iterdir()) + list(tmp_path.rglob(f".{PREFIX}*")) == []
    folders = [entry for entry in runs.glob("*/run.json") if verb == "run"]
    # A run that had started is reported as cancelled; before that there is nothing to report.
    if folders:
        assert process.returncode == 4, err
    elif process.returncode == 0:
        assert verb != "run" and out, "ended before the signal"
    else:
        assert process.returncode == 130 and err.splitlines()[-1] == "interrupted", err
        assert out == ""
    for path in folders:
        record = json.loads(path.read_text())
        result = json.loads(path.with_name("result.json").read_text())
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
