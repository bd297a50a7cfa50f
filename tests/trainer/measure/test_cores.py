"""A rank tells what the system gave it of its cores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, threading, time
from paceline.trainer.measure.machine import CoreUse

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
cores = CoreUse()

def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

start = time.perf_counter()
rival = os.fork()
if rival == 0:
    work(0.3)
    os._exit(0)
work(0.3)
rival_lap, wall_s = cores.lap(), time.perf_counter() - start
os.waitpid(rival, 0)
cores.lap()
time.sleep(0.2)
print(json.dumps([wall_s, rival_lap, cores.lap()]))
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's schedstat")
def test_waiting_for_a_core_is_told_and_sleeping_is_not():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    wall_s, beside, asleep = json.loads(done.stdout)
    # Two processes on one core: what was not computed was waited.
    assert beside["waited_s"] >= 0.2
    assert beside["waited_s"] == pytest.approx(wall_s - 0.3, rel=0.3)
    assert beside["user_s"] + beside["system_s"] >= 0.29
    assert asleep["user_s"] + asleep["system_s"] < 0.1
