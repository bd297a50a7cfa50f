"""Writing what a profiler has seen may take longer than a rank may stand still."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.trainer.config import ProfileConfig
from paceline.trainer.measure.profiler import Profiler, StepProfiler, closing
from paceline.trainer.parallel.mesh import World
from tests.trainer.example import places

LIMIT_S = 1.0
RANK = f"""
import os, time
from paceline.trainer.measure import heartbeat
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.parallel.mesh import Mesh, join_world
from paceline.trainer.train import make_profiler
from paceline.trainer.config import ProfileConfig

heartbeat.MIN_START_LIMIT_S = {LIMIT_S}
world = join_world("cpu")
pulse = heartbeat.Heartbeat(EventLog("steps", world.rank), f"rank-{{world.rank}}.stack")
profiler = make_profiler(ProfileConfig("memory", [0], 1, 1), world, Mesh(), pulse.pause)
assert profiler.is_profiled(1) is (world.rank == 0)
if world.rank == 0:
    profiler.close = lambda: time.sleep({3 * LIMIT_S})
pulse.start({LIMIT_S})
profiler.before_step(1)
profiler.after_step(1)
os._exit(0)
"""


def test_no_rank_is_ended_while_one_writes_its_profile(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], cwd=tmp_path, env=os.environ | place,
            stderr=subprocess.PIPE, text=True,
        )
        for place in places(2)
    ]  # fmt: skip
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


class Unwritable(StepProfiler):
    """Its disk is full."""

    def close(self) -> None:
        raise OSError("no space left")


def test_a_training_that_failed_keeps_its_own_exception() -> None:
    profiler = Unwritable(ProfileConfig("memory", [0], 1, 1), World(0, 0, 1, None, None))  # type: ignore[arg-type]
    with (
        pytest.raises(ValueError, match="the training's own") as caught,
        closing(profiler, profiler.pause_watchdog),
    ):
        raise ValueError("the training's own")
    assert "no space left" in caught.value.__notes__[0]
    with pytest.raises(OSError, match="no space left"), closing(profiler, profiler.pause_watchdog):
        pass
    with closing(Profiler(), profiler.pause_watchdog):
        pass
