"""Ranks that save together are connected as far as they exchange something."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests import forks
from tests.trainer.example import places


def test_the_checkpoint_group_connects_ranks_that_exchange_something_alone(tmp_path: Path) -> None:
    """Each rank with the first and a few more, not all with all: its plans go by a tree."""
    ranks = 8
    envs = [{**os.environ, **place} for place in places(ranks)]
    words = ["tests.trainer.group_driver", str(tmp_path)]
    code = forks.run("tests.trainer.example", words, envs, tmp_path, [os.devnull] * 3, 240)

    assert code == 0
    counts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    made = [after - before for before, after, _ in counts]
    used = [after - before for before, _, after in counts]
    assert max(made) <= 2, "all sockets at once would be 7"
    assert sum(used) < 0.8 * ranks * (ranks - 1)
