"""Words that the trainer writes and the package looks for: each has a copy, and they must agree."""

from __future__ import annotations

from paceline.runs import checkpoints
from paceline.trainer import checkpoint


def test_checkpoints_lie_where_they_are_looked_for():
    names = (
        checkpoints.CHECKPOINTS_FOLDER,
        checkpoints.LATEST_CHECKPOINT,
        checkpoints.CHECKPOINT_STATE,
    )
    assert names == (checkpoint.FOLDER, checkpoint.LATEST, checkpoint.STATE)
