"""Starts the sampler of power and energy beside a run on this machine, and ends it with the run."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.probe import telemetry_program

FOLDER = "telemetry"
END_LIMIT_S = 5.0


@contextmanager
def sampled(folder: Path, interval_s: float = 1.0, root: Path = Path("/")) -> Iterator[None]:
    """Telemetry of this host in `folder`/telemetry while the block runs.

    Where nothing can be read, only the line that says why is written and no program is started.
    """
    path = folder / FOLDER / f"{re.sub(r'[^A-Za-z0-9_.-]', '-', platform.node())}.jsonl"
    try:
        path.parent.mkdir(exist_ok=True)
        process = _started(path, interval_s, root)
    except OSError:
        process = None  # a full disk must not end the run that is measured
    try:
        yield
    finally:
        if process is not None:
            _end(process)


def _started(path: Path, interval_s: float, root: Path) -> subprocess.Popen[bytes] | None:
    counters = telemetry_program.Counters(root)
    start = telemetry_program.start_line(root, interval_s, counters)
    if not start["sources"]:
        path.write_text(json.dumps(start) + "\n", encoding="utf-8")
        return None
    program = [sys.executable, telemetry_program.__file__, str(path), str(interval_s), str(root)]
    return subprocess.Popen(
        program, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
