"""Whose quotas a new file counts against, and on which file system it lies."""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from paceline.staging.quotas.limits import NobodyToAskError, QuotaKind

MOUNTS = Path("/proc/self/mountinfo")
STATUS = Path("/proc/self/status")
USER_NUMBERS = Path("/proc/self/uid_map")
_CAP_SYS_RESOURCE = 1 << 24
"""Of linux/capability.h."""


@dataclass(frozen=True)
class MountedSystem:
    """A file system as the kernel lists it."""

    point: str
    type: str
    source: str


@dataclass(frozen=True)
class QuotaHolder:
    """A user, a group or a project."""

    kind: QuotaKind
    number: int

    @property
    def name(self) -> str:
        """Its name, or its number where it has none."""
        try:
            if self.kind == "user":
                return pwd.getpwuid(self.number).pw_name
            if self.kind == "group":
                return grp.getgrgid(self.number).gr_name
        except KeyError:
            pass  # Not every number has a name.
        return str(self.number)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def quota_holders(folder: Path, system: MountedSystem) -> tuple[QuotaHolder, ...]:
    """The user, and the group that a new file there belongs to, where limits hold for them.

    XFS keeps its defaults as limits of number 0, which it holds to none (`xfs_trans_dqresv`), and
    holds root to the limits of other groups; elsewhere CAP_SYS_RESOURCE exceeds all of them.
    """
    status = folder.stat()
    group = status.st_gid if status.st_mode & stat.S_ISGID else os.getegid()
    holders = QuotaHolder("user", os.geteuid()), QuotaHolder("group", group)
    if _is_in_user_namespace():
        return holders  # Neither 0 nor a capability is the host's there.
    if system.type == "xfs":
        return tuple(holder for holder in holders if holder.number)
    return () if _exceeds_limits() else holders


def mounted_system(folder: Path) -> MountedSystem:
    """The file system on which an existing folder lies; raises NobodyToAskError."""
    place = folder.resolve()
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise NobodyToAskError(f"{MOUNTS} cannot be read: {error.strerror}") from error
    systems = [system for line in lines if (system := _system(line))]
    around = [system for system in systems if place.is_relative_to(system.point)]
    if not around:
        raise NobodyToAskError(f"{MOUNTS} lists no file system of it")
    longest = max(len(system.point) for system in around)
    # The last of several at one place is the one that is seen.
    return [system for system in around if len(system.point) == longest][-1]


def _is_in_user_namespace() -> bool:
    try:
        return USER_NUMBERS.read_text().split() != ["0", "0", str(2**32 - 1)]
    except FileNotFoundError:
        return False  # This kernel has none.


def _exceeds_limits() -> bool:
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", STATUS.read_text(), re.MULTILINE)
    return bool(capabilities and int(capabilities[1], 16) & _CAP_SYS_RESOURCE)


def _system(line: str) -> MountedSystem | None:
    before, _, after = line.partition(" - ")
    fields, rest = before.split(" "), after.split(" ")
    if len(fields) < 6 or len(rest) < 2:
        return None
    return MountedSystem(_plain(fields[4]), rest[0], _plain(rest[1]))


def _plain(text: str) -> str:
    """Blanks stand there as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
