"""What the reproductions of attacks have in common."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from tests.attacks.fields import CHANGED, RUNS
from tests.command import PLAIN

ESCAPES = "\x1b]0;owned\x07\x1b[31m\x9b31m\u202ered"
"""Sequences that rename a window, change colours, in one byte too, and turn the reading order."""


def refused(done: subprocess.CompletedProcess[str], code: int = 1, words: str = "") -> None:
    """Assert that a verb ended with one clear line and its exit code."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert words in done.stderr, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert done.stdout == ""


def assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    """Assert that nothing printed can move a terminal."""
    for character in "\x1b\x07\x9b\u202e\x00":
        assert character not in done.stdout and character not in done.stderr, repr(character)
    assert "Traceback" not in done.stderr


def stored_run(root: Path, name: str = CHANGED, **fields: Any) -> Path:
    """A copy of a recorded run under `root`, with other fields in its run.json."""
    folder = root / name
    shutil.copytree(RUNS / CHANGED, folder)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, **fields}))
    return folder


def recipe_with(path: Path, old: str, new: str) -> Path:
    """tiny-llama as a file in which the line that begins with `old` is `new`."""
    text = (resources.files("paceline.files") / "recipes" / "tiny-llama.yaml").read_text()
    lines = [new if line.startswith(old) else line for line in text.splitlines()]
    assert new in lines
    path.write_text("\n".join(lines) + "\n")
    return path


MEASURING = """
import os, sys
if not (pid := os.fork()):
    os.execvp(sys.argv[2], sys.argv[2:])
_, status, usage = os.wait4(pid, 0)
open(sys.argv[1], "w").write(f"{status} {usage.ru_maxrss}")
"""
"""Program that starts another one and writes its status and its peak of memory to a file. Linux
counts the memory of a process for a child that it starts, and that of the tests is large."""


def bounded(
    *words: object,
    runs: Path,
    limit_s: float = 60,
    max_mib: int = 512,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a verb in a process of its own; assert its time and the peak of its memory."""
    places = {"PACELINE_RUNS": str(runs), "XDG_CACHE_HOME": str(runs / "cache")}
    command = [sys.executable, "-m", "paceline", *map(str, words)]
    limited = ["prlimit", f"--as={4 << 30}", *command]
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        tempfile.NamedTemporaryFile("w+") as usage_file,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", MEASURING, usage_file.name, *limited],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **PLAIN, **places, **(env or {})},
            start_new_session=True,
        )
        timer = threading.Timer(limit_s, os.killpg, [process.pid, signal.SIGKILL])
        timer.start()
        process.wait()
        timer.cancel()
        out.seek(0), err.seek(0)
        printed, errors, usage = out.read(), err.read(), usage_file.read().split()
    assert usage, f"took more than {limit_s} s"
    status, peak_kib = map(int, usage)
    assert peak_kib < max_mib * 1024, f"took {peak_kib // 1024:,} MiB"
    return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), printed, errors)
