"""One stager an asset, also where the folder is shared by hosts and knows no file locks.

The lock is a file that only one can create (O_EXCL), which names its owner and is touched again
and again. Whether an owner of another host or boot lives is seen by that touch alone: by its
change, as hosts' clocks differ. An owner of this host that is gone is noticed at once.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.value import Value
from paceline.files.documents import read_value
from paceline.files.run_folder import Controller, boot_id, is_alive, this_controller

LOCK_FILE = "lock"
HEARTBEAT_S = 5.0
STALE_S = 120.0
"""Without a touch for so long an owner on another host is taken to be dead."""
LOOK_AGAIN_S = 0.2

_Pulse = tuple[int, int]


class LockOwner(Value):
    """Who stages an asset."""

    token: str
    """Of this very lock: no two are alike."""
    controller: Controller
    process_space: str
    """Where pids have their meaning: those of another container say nothing here."""


class LostLockError(SystemFaultError):
    """Another stager has taken over, as after a long sleep of this one."""


class StageLock:
    """Holds an asset's folder as long as its block runs; `waiting` is called with the owner."""

    def __init__(
        self,
        folder: Path,
        waiting: Callable[[LockOwner | None], None] = lambda owner: None,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        stale_s: float = STALE_S,
    ) -> None:
        self._path = folder / LOCK_FILE
        self._waiting, self._heartbeat_s, self._stale_s = waiting, heartbeat_s, stale_s
        drawn, controller = uuid.uuid4().hex, this_controller()
        self._owner = LockOwner(token=drawn, controller=controller, process_space=_process_space())
        self._ended, self._lost = threading.Event(), threading.Event()
        self._beat = threading.Thread(target=self._keep, name="stage-lock", daemon=True)

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        seen: tuple[_Pulse | None, float] = (None, time.monotonic())
        while not self._created():
            owner, pulse = _read(self._path), _pulse(self._path)
            if pulse != seen[0]:
                seen = (pulse, time.monotonic())
            silent_s = time.monotonic() - seen[1]
            if pulse and (_is_gone(owner) or silent_s > self._stale_s) and self._took(owner, pulse):
                break
            self._waiting(owner)
            time.sleep(LOOK_AGAIN_S)
        self._beat.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._beat.join()
        with suppress(OSError):
            if self._is_mine():
                self._path.unlink()

    def check(self) -> None:
        """Raise LostLockError when another stager has taken over."""
        if self._lost.is_set():
            raise self._lost_error()

    def confirm(self) -> None:
        """The same by a look at the file, as before what must not be done twice."""
        if not self._is_mine():
            self._lost.set()
        self.check()

    def _created(self) -> bool:
        """Whether the lock could be made by this process."""
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self._owner.model_dump_json())
        except OSError:
            # An empty lock would be nobody's, and in everybody's way until it is stale.
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _took(self, dead: LockOwner | None, pulse: _Pulse) -> bool:
        """Whether the lock of a dead owner became this one's.

        A claim is named by the dead lock, so that only one of several can take it: a second would
        take the lock of the first.
        """
        claim = self._path.with_name(f"{LOCK_FILE}.{dead.token if dead else pulse[1]}")
        try:
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            # Who claims replaces the lock at once; a claim that lies for long has a dead owner too.
            with suppress(OSError):
                if time.time() - claim.stat().st_mtime > self._stale_s:
                    claim.unlink()
            return False
        mine = self._path.with_name(f"{LOCK_FILE}.{self._owner.token}.new")
        try:
            if _pulse(self._path) != pulse:
                return False
            mine.write_text(self._owner.model_dump_json(), encoding="utf-8")
            mine.replace(self._path)
            return True
        finally:
            mine.unlink(missing_ok=True)
            claim.unlink(missing_ok=True)

    def _keep(self) -> None:
        while not self._ended.wait(self._heartbeat_s):
            if not self._is_mine():
                self._lost.set()
                return
            with suppress(OSError):
                os.utime(self._path)

    def _is_mine(self) -> bool:
        owner = _read(self._path)
        return owner is not None and owner.token == self._owner.token

    def _lost_error(self) -> LostLockError:
        return LostLockError(
            str(self._path.parent),
            "another stager has taken it over, as this one gave no sign of life",
            remedy="run the command again: it goes on with what is there",
        )


def _read(path: Path) -> LockOwner | None:
    """The owner; None where the file is gone or still empty."""
    try:
        return read_value(path, LockOwner)
    except (UserError, SystemFaultError):
        return None


def _pulse(path: Path) -> _Pulse | None:
    """What changes with each touch and each owner."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _is_gone(owner: LockOwner | None) -> bool:
    """Whether an owner is known to be dead.

    Another boot tells nothing: two hosts may share a name, and then its owner lives.
    """
    if owner is None or owner.process_space != _process_space():
        return False
    if owner.controller.boot_id != boot_id():
        return False
    return not is_alive(owner.controller)


def _process_space() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
