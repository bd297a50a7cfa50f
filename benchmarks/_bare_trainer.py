"""The native trainer without measuring: no event line, no rank statistics, no communication hook.

Run like native/main.py, from a run folder. Rank 0 writes the moments at which steps ended to
bare.json, which costs one clock reading a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path("native").resolve()))

import itertools

from torch.nn.parallel import DistributedDataParallel

import train
from config import parse_config, read_json
from record import EventLog


def main() -> None:
    """Train as trainer.json says and keep only the time of day after each step."""
    ends: list[float] = []

    def note_only(_self: Any, done: Any) -> None:
        done.loss_and_norm.tolist()  # a trainer looks at its loss in any case
        ends.append(time.perf_counter())

    def keep_default_hook(*_arguments: Any) -> None:
        """Leave DDP's own all-reduce in place."""

    train.Trainer._write = note_only
    train.watch_waits = lambda _steps: lambda: None
    DistributedDataParallel.register_comm_hook = keep_default_hook
    rank = int(os.environ.get("RANK", "0"))
    train.train(parse_config(read_json(sys.argv[1])), EventLog("bare", rank))
    if rank == 0:
        steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
        Path("bare.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
