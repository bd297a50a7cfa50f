"""The native trainer, waiting for its turn: python _native_in_turns.py trainer.json BLOCK."""

from __future__ import annotations

import sys
from typing import Any

from _turns import BlockTimer

from paceline.trainer import train
from paceline.trainer.config import parse_config, read_json
from paceline.trainer.data.batches import Loader
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.measure.heartbeat import Heartbeat
from paceline.trainer.measure.mllog import open_run


def main(path: str, block: int) -> None:
    """Train as the file says; a step is all from one request for a batch to the next."""
    turn = BlockTimer(block)
    take = Loader.next

    def wait_and_take(self: Loader) -> Any:
        turn.step()
        return take(self)

    Loader.next = wait_and_take  # type: ignore[method-assign]
    config, events = parse_config(read_json(path)), EventLog("steps", 0)
    timed_run = open_run(config, rank=0)
    timed_run.begin()
    train.train(config, events, Heartbeat(events, "stack"), timed_run)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
