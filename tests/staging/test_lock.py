"""Two stagers of one asset: one works, the other waits, and a dead one is in nobody's way."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.staging.lock import LOCK_FILE, LostLockError, StageLock

HOLD = """
import sys, time
from pathlib import Path
from paceline.staging.lock import StageLock
with StageLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def pretend(folder: Path, **changes: object) -> None:
    """Let the lock in a folder be another host's."""
    owner = json.loads((folder / LOCK_FILE).read_text())
    owner["controller"] |= changes
    # At once: its owner, who looks at it meanwhile, takes half a lock for another's.
    (folder / "pretended").write_text(json.dumps(owner))
    (folder / "pretended").replace(folder / LOCK_FILE)


def test_only_one_holds_it(tmp_path: Path):
    inside, most, waits = [0], [0], []

    def work() -> None:
        for _ in range(5):
            with StageLock(tmp_path, waits.append):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and not (tmp_path / LOCK_FILE).exists()


def test_a_killed_owner_is_noticed_at_once(tmp_path: Path):
    process = holder(tmp_path)
    waited, killed = threading.Event(), threading.Event()

    def end() -> None:
        waited.wait(20)
        killed.set()
        process.kill()
        process.wait()

    thread = threading.Thread(target=end)
    thread.start()
    with StageLock(tmp_path, lambda owner: waited.set(), stale_s=1e9):
        assert killed.is_set()
    thread.join()
    process.communicate()


@pytest.mark.parametrize("elsewhere", [{"host": "another"}, {"boot_id": "another of this name"}])
def test_a_silent_owner_on_another_host_is_replaced_and_a_living_one_is_not(
    tmp_path: Path, elsewhere: dict[str, str]
):
    first = StageLock(tmp_path, heartbeat_s=0.05)
    with first:
        pretend(tmp_path, **elsewhere)
        begun = threading.Event()
        second = StageLock(tmp_path, lambda owner: begun.set(), stale_s=2.0)
        entered = threading.Event()

        def enter() -> None:
            with second:
                entered.set()

        thread = threading.Thread(target=enter)
        thread.start()
        assert begun.wait(20) and not entered.wait(4)
    thread.join(20)
    assert entered.is_set()

    (tmp_path / LOCK_FILE).write_text("")
    with StageLock(tmp_path, stale_s=0.1):
        pass


def test_a_full_disk_leaves_no_lock_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lock = StageLock(tmp_path)

    def full(handle: int, *how: object, **more: object) -> None:
        os.close(handle)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", full)
        with pytest.raises(OSError, match="No space"), lock:
            pass
    assert not list(tmp_path.iterdir())


def test_an_owner_who_was_replaced_is_told(tmp_path: Path):
    with StageLock(tmp_path, heartbeat_s=1e6) as asleep:
        asleep.confirm()
        pretend(tmp_path, host="another")
        with StageLock(tmp_path, stale_s=0.1) as awake:
            awake.confirm()
            with pytest.raises(LostLockError, match="taken it over"):
                asleep.confirm()
            with pytest.raises(LostLockError):
                asleep.check()


def test_of_many_who_find_a_dead_owner_one_takes_over(tmp_path: Path):
    process = holder(tmp_path)
    process.kill()
    process.communicate()
    inside, most = [0], [0]
    guard = threading.Lock()

    def work() -> None:
        with StageLock(tmp_path):
            with guard:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            threading.Event().wait(0.02)
            with guard:
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert not list(tmp_path.iterdir())
