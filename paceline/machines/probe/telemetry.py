"""Start and end of the power and energy sampler for a run on this machine.

On the nodes of a cluster the launchers' agent starts it instead.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.core.interrupts import deferred_interrupts
from paceline.machines.probe import telemetry_program

FOLDER = "telemetry"
SYSTEM_ROOT = "PACELINE_SYSTEM_ROOT"
"""Variable with the root of the kernel's files, for example in a container; / if it is not set."""
END_LIMIT_S = 5.0


@contextmanager
def sample_telemetry(
    folder: Path, interval_s: float = 1.0, root: Path | None = None
) -> Iterator[None]:
    """Write telemetry of this host to `folder`/telemetry while the block runs.

    If nothing can be read, only the line with the reason is written and no program is started.
    """
    path = folder / FOLDER / f"{re.sub(r'[^A-Za-z0-9_.-]', '-', platform.node())}.jsonl"
    process = None
    try:
        # An interrupt inside Popen would leave an unknown process; a full disk must not end the
        # run that is measured.
        with deferred_interrupts(), suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            root = root or Path(os.environ.get(SYSTEM_ROOT) or "/")
            process = _start_sampler(path, interval_s, root)
        yield
    finally:
        if process is not None:
            _stop_sampler(process)


def _start_sampler(path: Path, interval_s: float, root: Path) -> subprocess.Popen[bytes] | None:
    counters = telemetry_program.Counters(root)
    driver = telemetry_program.devices()
    start = telemetry_program.start_line(interval_s, counters, driver)
    if not start["sources"]:
        path.write_text(json.dumps(start) + "\n", encoding="utf-8")
        return None
    options = [str(path), str(interval_s), str(root), str(os.getpid())]
    return subprocess.Popen(
        [sys.executable, telemetry_program.__file__, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _stop_sampler(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
