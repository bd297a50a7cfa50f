"""A real job of many ranks on this machine: it starts, trains, saves, loses a rank and ends.

    python benchmarks/many_ranks.py [--ranks 64] [--limit 1500]                 (`make nightly`)

`paceline run` trains the smallest Llama variant with ZeRO 1 over all ranks, one thread each, and
saves a checkpoint every few steps. When two are written, one rank is killed by its process id. The
run must end by itself, name that rank and its signal, keep a whole checkpoint and the steps of all
ranks, and leave no process. Exit code 1 when one of these does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from _result import Surroundings, keep

RANK_BYTES = 200 * 2**20
"""Memory per rank with some margin; libraries are shared."""
EVERY = 4
"""Steps between two checkpoints."""
SETTINGS = (
    "data.source=synthetic",
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.ffn_size=128",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.vocab_size=512",
    "seq_len=32",
    "layout.zero_stage=1",
    "layout.micro_batch=1",
    "steps=100000",
    "compile=none",
    f"checkpoint.every={EVERY}",
    "hang_limit_s=240",
)
POLL_S = 0.5


class LateError(Exception):
    """The job did not come so far in time."""


def start(runs: Path, ranks: int) -> subprocess.Popen[str]:
    """Start the run, whose answer goes to a file next to its folder."""
    sets = [word for setting in (*SETTINGS, f"global_batch={ranks}") for word in ("--set", setting)]
    call = [sys.executable, "-m", "paceline", "run", "tiny-llama", "--devices", str(ranks)]
    call += ["--no-probe", "--runs-dir", str(runs), *sets, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with (runs / "answer.json").open("w") as answer, (runs / "errors.txt").open("w") as errors:
        return subprocess.Popen(call, stdout=answer, stderr=errors, env=environment, text=True)


def wait_for(what: str, condition: Any, process: subprocess.Popen[str], deadline: float) -> Any:
    """Return the value of `condition` once it is true; LateError if the run ends or is late."""
    while time.monotonic() < deadline:
        if value := condition():
            return value
        if process.poll() is not None:
            raise LateError(f"the run ended before {what}")
        time.sleep(POLL_S)
    raise LateError(f"no {what} in time")


def first_lines(folder: Path, ranks: int) -> list[dict[str, Any]] | None:
    """Return the start lines of all ranks once all have started."""
    files = sorted(folder.glob("steps/rank-*.jsonl"))
    if len(files) < ranks:
        return None
    texts = [file.open().readline() for file in files]
    return (
        [json.loads(text) for text in texts] if all(text.endswith("\n") for text in texts) else None
    )


def resident(pids: list[int]) -> int:
    """Largest resident memory of these processes, in bytes."""
    return max(psutil.Process(pid).memory_info().rss for pid in pids)


def trial(runs: Path, ranks: int, limit_s: float) -> dict[str, Any]:
    """Return the outcome of a run with `ranks` ranks, of which the last but one is killed."""
    began = time.monotonic()
    deadline = began + limit_s
    process = start(runs, ranks)
    try:
        folders = lambda: [p.parent for p in runs.glob("*/run.json")]  # noqa: E731
        (folder,) = wait_for("run folder", folders, process, deadline)
        starts = wait_for("start of all", lambda: first_lines(folder, ranks), process, deadline)
        started_s = time.monotonic() - began
        latest = folder / f"checkpoints/step-{2 * EVERY:06d}/state.json"
        wait_for("second checkpoint", latest.exists, process, deadline)
        pids, killed_rank = [line["pid"] for line in starts], ranks - 2
        largest = resident(pids)
        os.kill(pids[killed_rank], signal.SIGKILL)
        kill_time = time.monotonic()
        process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(120)
    ended_s = time.monotonic() - kill_time
    result = json.loads((folder / "result.json").read_text())
    whole = folder.glob("checkpoints/step-*/state.json")
    checkpoint_steps = [line for line in steps_of(folder, 0) if "checkpoint_s" in line]
    return {
        "ranks": ranks,
        "started_s": started_s,
        "resident_bytes": largest,
        "steps": min(len(steps_of(folder, rank)) for rank in range(ranks)),
        "step_time_s": median(line["step_time_s"] for line in steps_of(folder, 0)),
        "checkpoint_s": [line["checkpoint_s"] for line in checkpoint_steps],
        "killed_rank": killed_rank,
        "ended_after_s": ended_s,
        "exit_code": process.returncode,
        "status": result["status"],
        "reason": result["reason"],
        "whole_checkpoints": sorted(path.parent.name for path in whole),
        "left_running": sum(psutil.pid_exists(pid) for pid in pids),
    }


def steps_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """A rank's whole step lines."""
    lines = (folder / f"steps/rank-{rank:05d}.jsonl").read_text().split("\n")[:-1]
    return [step for line in lines if (step := json.loads(line))["event"] == "step"]


def faults(trial: dict[str, Any]) -> list[str]:
    """Return the checks that a trial failed."""
    end_reason = f"rank {trial['killed_rank']} was killed by SIGKILL"
    checks = {
        f"the reason is {trial['reason']!r}": end_reason in str(trial["reason"]),
        f"the status is {trial['status']}": trial["status"] == "failed",
        f"the exit code is {trial['exit_code']}": trial["exit_code"] == 2,
        "no whole checkpoint is left": bool(trial["whole_checkpoints"]),
        f"{trial['left_running']} ranks are left": not trial["left_running"],
        f"a rank has {trial['steps']} steps": trial["steps"] >= 2 * EVERY,
    }
    return [fault for fault, is_met in checks.items() if not is_met]


def main() -> int:
    """Run, print and keep; 2 where the machine has too little memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--limit", type=float, default=1500.0, help="Time limit in seconds.")
    options = parser.parse_args()
    if psutil.virtual_memory().available < options.ranks * RANK_BYTES:
        print(f"{options.ranks} ranks need {options.ranks * RANK_BYTES / 2**30:.0f} GiB of memory")
        return 2
    around = Surroundings()
    with tempfile.TemporaryDirectory() as name:
        try:
            outcome = trial(Path(name), options.ranks, options.limit)
        except LateError as error:
            errors = (Path(name) / "errors.txt").read_text()[-1500:]
            answer = (Path(name) / "answer.json").read_text()[-1500:]
            print(f"{error}\n{errors}\n{answer}", file=sys.stderr)
            return 1
    failures = faults(outcome)
    print(json.dumps(outcome, indent=2))
    print("\n".join(failures) or "all kept")
    keep("many_ranks", "seconds", around, **outcome, faults=failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
