"""Words that the trainer writes and the package looks for: each has its own copy, which must agree."""

from __future__ import annotations

import checkpoint
import heartbeat
from outcome import outcome
from paceline.runs import ending, plan


def test_a_watchdogs_reason_begins_and_ends_as_it_is_read():
    assert ending.NO_PROGRESS == heartbeat.NO_PROGRESS
    assert ending.WAITING == heartbeat.WAITING


def test_a_lost_peer_is_told_as_it_is_read():
    _, reason = outcome(RuntimeError("Connection closed by peer"))
    _, other = outcome(RuntimeError("a fault of its own"))

    assert reason.startswith(f"{ending.LOST_PEER}: ") and ending.LOST_PEER not in other


def test_checkpoints_lie_where_they_are_looked_for():
    found = plan.CHECKPOINTS_FOLDER, plan.LATEST_CHECKPOINT, plan.CHECKPOINT_STATE
    assert found == (checkpoint.FOLDER, checkpoint.LATEST, checkpoint.STATE)
