"""The native trainer, measuring in every other block of steps and bare in the blocks between.

Run in place of `trainer`, from a run folder. A bare step writes no event line, reads no clock marks
and no memory. Rank 0 writes blocks.json: the seconds of each step, by block.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path("trainer").resolve()))

from paceline.trainer import train, trainer
from paceline.trainer.config import parse_config, read_json
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.measure.heartbeat import Heartbeat
from paceline.trainer.measure.mllog import open_run

BLOCK_STEPS = 10


def main() -> None:
    """Train as trainer.json says and keep the time of day after each step."""
    ends: list[float] = []
    write = trainer.Trainer._write

    def toggle(self: Any, num_done: Any) -> None:
        if (num_done.step - 1) // BLOCK_STEPS % 2 == 0:
            write(self, num_done)
        else:
            num_done.loss_and_norm.tolist()  # a trainer looks at its loss in any case
        ends.append(time.perf_counter())

    trainer.Trainer._write = toggle
    rank = int(os.environ.get("RANK", "0"))
    config, events = parse_config(read_json(sys.argv[1])), EventLog("steps", rank)
    heartbeat = Heartbeat(events, f"logs/rank-{rank:05d}.stack")
    heartbeat.start(config.hang_limit_s)
    timed_run = open_run(config, rank)
    timed_run.begin()
    train.train(config, events, heartbeat, timed_run)
    heartbeat.stop()
    if rank == 0:
        steps = [b - a for a, b in zip(ends, ends[1:], strict=False)]  # noqa: RUF007
        # The first step has no step before it, so block 0 is one short.
        starts = range(0, len(ends), BLOCK_STEPS)
        blocks = [steps[max(0, i - 1) : i - 1 + BLOCK_STEPS] for i in starts]
        Path("blocks.json").write_text(json.dumps(blocks))


if __name__ == "__main__":
    main()
