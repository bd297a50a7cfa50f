"""Cost for the controller of following a job with very many ranks: share of one core.

    python benchmarks/follow_ranks.py [--ranks 16384] [--seconds 60] [--quick]

A generator, which is a process of its own, writes what ranks write: event lines of rank 0 and of
ever other ranks, and the times of the watchdogs' files. The controller follows as `paceline run`
does: rank 0's lines five times a second, activity each second. At the end a rank fails; how
long until that is known is printed as well. Only the controller's processor time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.files.run_folder import LOGS_FOLDER, STEPS_FOLDER
from paceline.runs.flow import POLL_S
from paceline.runs.step_follower import JobHeartbeat, StepFollower
from paceline.trainer.measure.event_log import EventLog

HANG_LIMIT_S = 300.0
STEP_S = 1.0
WRITERS = 2000
"""Ranks whose files the generator rewrites in each step; the others stay unchanged."""


def make_ranks(folder: Path, ranks: int) -> None:
    """Write the files of `ranks` started ranks: event lines, log, stacks."""
    start = json.dumps({"event": "start", "schema": 1}) + "\n"
    for name in (STEPS_FOLDER, LOGS_FOLDER):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        stem = f"rank-{rank:05d}"
        (folder / STEPS_FOLDER / f"{stem}.jsonl").write_text(start)
        for suffix in ("log", "stack"):
            (folder / LOGS_FOLDER / f"{stem}.{suffix}").touch()


def step_line(step: int) -> str:
    """An event line as long as the trainer's."""
    values = {"loss": 3.2, "grad_norm": 1.1, "lr": 1e-4, "tokens": 8192.0, "samples": 1.0}
    times = {"step_time_s": STEP_S, "busy_time_s": 0.9, "comm_wait_s": 0.1, "data_wait_s": 0.0}
    memory = {"memory_bytes": {"allocated": 1, "reserved": 2, "device_used": 3, "resident": 4}}
    return json.dumps({"event": "step", "step": step, **values, **times, **memory}) + "\n"


def generate(folder: Path, ranks: int) -> None:
    """Write for all ranks, a part of them in each step, until the parent ends this process."""
    step = 0
    while True:
        step += 1
        began, line = time.monotonic(), step_line(step)
        first = step * WRITERS % ranks
        for rank in {0, *((first + i) % ranks for i in range(min(WRITERS, ranks)))}:
            with (folder / STEPS_FOLDER / f"rank-{rank:05d}.jsonl").open("a") as file:
                file.write(line)
            os.utime(folder / LOGS_FOLDER / f"rank-{rank:05d}.stack")
        time.sleep(max(0.0, STEP_S - (time.monotonic() - began)))


def follow(folder: Path, seconds: float, failing: int | None = None) -> dict[str, Any]:
    """Follow for `seconds`, or until a rank's failure is reported, which is immediate."""
    steps = StepFollower(folder / STEPS_FOLDER / "rank-00000.jsonl")
    heartbeat = JobHeartbeat(folder, HANG_LIMIT_S)
    if failing is None:
        # The listing at the start, and the reading of what is there already, are paid once.
        heartbeat._last_check_s -= 2.0
        heartbeat.check()
        steps.new_steps()
    else:
        heartbeat = JobHeartbeat(folder, HANG_LIMIT_S)
        heartbeat._last_check_s -= 2.0
        heartbeat.check()
        log = EventLog(str(folder / STEPS_FOLDER), failing)
        log.write("end", status="failed", reason="a test", steps=1, time_unix=time.time())
    began, cpu, num_steps, silent_s = time.monotonic(), time.process_time(), 0, 0.0
    while time.monotonic() - began < seconds and not heartbeat.failed_s:
        num_steps += len(steps.new_steps())
        heartbeat.check()
        silent_s = max(silent_s, heartbeat.silent_s)
        time.sleep(POLL_S)
    took = time.monotonic() - began
    return {
        "seconds": took,
        "steps_seen": num_steps,
        "share_of_a_core": (time.process_time() - cpu) / took,
        "longest_silence_s": silent_s,
        "failed": bool(heartbeat.failed_s),
    }


def measure(ranks: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a job with `ranks` ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_ranks(folder, ranks)
        generator = subprocess.Popen([sys.executable, __file__, "--write", name, str(ranks)])
        try:
            time.sleep(2 * STEP_S)
            figures = follow(folder, seconds)
            failure = follow(folder, seconds, failing=ranks - 1)
        finally:
            generator.kill()
            generator.wait()
    notice_s = failure["seconds"] if failure["failed"] else None
    return {"ranks": ranks, **figures, "failure_noticed_after_s": notice_s}


def main() -> int:
    """Measure, print and keep."""
    from _result import Surroundings, keep

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--quick", action="store_true", help="512 ranks for 4 s; nothing is written."
    )
    options = parser.parse_args()
    around = Surroundings()
    sizes = (512,) if options.quick else (64, 1024, options.ranks)
    rows = [measure(ranks, 4.0 if options.quick else options.seconds) for ranks in sizes]
    for row in rows:
        print(
            f"{row['ranks']:6d} ranks: {row['share_of_a_core']:.2%} of a core, "
            f"{row['steps_seen']} steps seen in {row['seconds']:.0f} s, longest silence "
            f"{row['longest_silence_s']:.1f} s, failure noticed after "
            f"{row['failure_noticed_after_s']:.1f} s"
        )
    if not options.quick:
        keep("follow_ranks", "share of one core", around, step_time_s=STEP_S, rows=rows)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        generate(Path(sys.argv[2]), int(sys.argv[3]))
    sys.exit(main())
