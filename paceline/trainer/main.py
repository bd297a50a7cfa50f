"""Train one model: python -m paceline.trainer.main trainer.json, once per rank.

Any launcher that sets RANK and the other variables of torch.distributed can start it; a single
process needs none. Every rank appends JSON lines to <events>/rank-NNNNN.jsonl and prints to
<logs>/rank-NNNNN.log. When the watchdog ends a rank, its stacks are in <logs>/rank-NNNNN.stack. The
exit code is 0 when all steps were completed. Paths are relative to the working directory.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

from paceline.trainer.config import ConfigError, parse_config, read_json
from paceline.trainer.measure.event_log import EventLog, has_ended, redirect_output
from paceline.trainer.measure.heartbeat import Heartbeat
from paceline.trainer.measure.machine import die_with_parent
from paceline.trainer.measure.mllog import MlperfRun, open_run
from paceline.trainer.measure.outcome import outcome

MAX_END_WAIT_S = 10.0
"""Maximum wait for the end lines of other ranks that fail in the same step."""


def main(path: str) -> int:
    """Train, write an end line whatever happens, and return the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    parent = os.getppid()
    if "RANK" in os.environ:
        die_with_parent(parent)
    raw = read_json(path)
    logs = raw.get("logs", "logs")
    redirect_output(logs, rank)
    events = EventLog(raw.get("events", "steps"), rank)
    heartbeat = Heartbeat(events, str(Path(logs) / f"rank-{rank:05d}.stack"))
    status, reason, cause = "ok", None, None
    mlperf_run: MlperfRun | None = None
    target_reached: bool | None = None
    try:
        config = parse_config(raw)
        heartbeat.start(config.hang_limit_s)
        mlperf_run = open_run(config, rank)
        mlperf_run.begin()
        # Importing torch takes a second and may fail, so it comes after the redirection.
        from paceline.trainer.train import train

        target_reached = train(config, events, heartbeat, mlperf_run)
    except Exception as error:  # every failure becomes an end line
        traceback.print_exc()
        status, reason, cause = outcome(error)
        if mlperf_run is not None:
            mlperf_run.stop(reached=False)
    while not heartbeat.stop():
        time.sleep(1)  # the watchdog is ending this rank
    write_end(events, status, reason, cause, target_reached)
    heartbeat.remove_empty_stack()
    if status == "nan":
        wait_for_end_lines(raw.get("events", "steps"))
    return 0 if status == "ok" else 1


def write_end(
    events: EventLog,
    status: str,
    reason: str | None,
    cause: str | None = None,
    reached: bool | None = None,
) -> None:
    """Write the end line; `reached` is None without a target."""
    optional = {"cause": cause, "reached": reached}
    events.write(
        "end",
        status=status,
        reason=reason,
        steps=events.steps_done,
        time_unix=time.time(),
        **{name: value for name, value in optional.items() if value is not None},
    )


def wait_for_end_lines(folder: str) -> None:
    """Wait until all ranks of this node have written their end lines.

    A launcher ends all ranks with the first one. NaN weights end all ranks in the same step, but
    not at the same time on a busy machine.
    """
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    ranks = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    deadline = time.monotonic() + MAX_END_WAIT_S
    while time.monotonic() < deadline and not all(has_ended(folder, rank) for rank in ranks):
        time.sleep(0.05)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: trainer trainer.json")
    try:
        code = main(sys.argv[1])
    except (OSError, ValueError, ConfigError) as error:
        sys.exit(f"trainer: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit may wait for peers that never answer, and gloo's threads can abort it (PyTorch
    # 2.11: "terminate called without an active exception" after a successful run).
    os._exit(code)
