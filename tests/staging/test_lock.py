"""Two stagers of one asset: one works, the other waits, and a dead one is in nobody's way."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from paceline.staging.stager import asset_lock

HOLD = """
import sys, time
from pathlib import Path
from paceline.staging.stager import asset_lock
with asset_lock(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(60)
"""


def test_only_one_holds_it(tmp_path: Path):
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(5):
            with asset_lock(tmp_path, lambda owner: None):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_the_owner_is_named_and_a_killed_one_is_noticed_at_once(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    owners: list[str] = []

    def waiting(owner: str) -> None:
        owners.append(owner)
        process.kill()

    with asset_lock(tmp_path, waiting):
        assert process.wait() == -9
    assert owners[0].startswith(f"process {process.pid} on ")
    process.communicate()
