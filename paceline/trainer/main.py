"""Trains one model: python -m paceline.trainer.main trainer.json, once per rank.

Started by `python -m torch.distributed.run`, or alone for a world of one. Every rank appends JSON
lines to <events>/rank-NNNNN.jsonl, prints to <logs>/rank-NNNNN.log, and leaves its stacks in
<logs>/rank-NNNNN.stack when it is ended. The exit code is 0 when all steps were done. Paths are
relative to the working directory.
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

LAST_WORDS_S = 10.0
"""How long a rank waits for the end lines of others that fail in the same step."""


def main(path: str) -> int:
    """Train, and leave an end line whatever happens; returns the exit code."""
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
    timed: MlperfRun | None = None
    reached: bool | None = None
    try:
        config = parse_config(raw)
        heartbeat.start(config.hang_limit_s)
        timed = open_run(config, rank)
        timed.begin()
        # Importing torch takes a second and may fail; both belong after the redirection.
        from paceline.trainer.train import train

        reached = train(config, events, heartbeat, timed)
    except Exception as error:  # the program's edge: every failure becomes an end line
        traceback.print_exc()
        status, reason, cause = outcome(error)
        if timed is not None:
            timed.stop(reached=False)
    while not heartbeat.stop():
        time.sleep(1)  # the watchdog has given up on this rank, and ends it
    end(events, status, reason, cause, reached)
    heartbeat.remove_empty_stack()
    if status == "nan":
        await_end_lines(raw.get("events", "steps"))
    return 0 if status == "ok" else 1


def end(
    events: EventLog,
    status: str,
    reason: str | None,
    cause: str | None = None,
    reached: bool | None = None,
) -> None:
    """Write the end line; `reached` says whether the target was, None where there is none."""
    optional = {"cause": cause, "reached": reached}
    events.write(
        "end",
        status=status,
        reason=reason,
        steps=events.steps_done,
        time_unix=time.time(),
        **{name: value for name, value in optional.items() if value is not None},
    )


def await_end_lines(folder: str) -> None:
    """Return when all ranks of this node have written theirs: a launcher ends all with the first.

    Lost weights end all ranks in the same step, but on a busy machine not at the same time.
    """
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    ranks = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    deadline = time.monotonic() + LAST_WORDS_S
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
    # A normal exit may wait for peers that never answer, and gloo's threads can abort it (seen with
    # PyTorch 2.11: "terminate called without an active exception" after a good run).
    os._exit(code)
