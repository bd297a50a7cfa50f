"""Words that the trainer writes and the package looks for: each has a copy, and they must agree."""

from __future__ import annotations

from paceline.runs import plan
from paceline.trainer import checkpoint


def test_checkpoints_lie_where_they_are_looked_for():
    found = plan.CHECKPOINTS_FOLDER, plan.LATEST_CHECKPOINT, plan.CHECKPOINT_STATE
    assert found == (checkpoint.FOLDER, checkpoint.LATEST, checkpoint.STATE)
