"""A rank's event lines on a disk that fills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FILLS = """
import resource
from paceline.trainer.measure.event_log import EventLog
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
events = EventLog("steps", 0)
try:
    while True:
        events.write("step", step=events.steps_done + 1)
except OSError:
    print(events.steps_done)
"""


def test_a_line_that_is_not_taken_whole_is_an_error_and_no_step(tmp_path: Path):
    command = [sys.executable, "-c", FILLS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *whole, torn = (tmp_path / "steps" / "rank-00000.jsonl").read_text().split("\n")
    assert [json.loads(line)["step"] for line in whole] == list(range(1, int(done.stdout) + 1))
    assert 0 < len(torn) < len(whole[-1])
