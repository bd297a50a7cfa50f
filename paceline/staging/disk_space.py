"""Free bytes and files of the disk under a stage folder.

Quotas are not read in advance, because no interface shows all of them. A write over a quota fails
with EDQUOT, which is reported like a full disk. Received data is kept, and the next call resumes.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import SystemFaultError
from paceline.core.units import pluralize, si, verb_form
from paceline.staging.plan import StagingPlan

REMEDY = "free some space, or choose another folder with --to"


@dataclass(frozen=True)
class DiskSpace:
    """Free space of a stage folder."""

    bytes_free: int
    """Bytes that this user may still write to the disk."""
    files_free: int | None
    """Free inodes; None if the file system has no limit."""


def disk_space(folder: Path) -> DiskSpace:
    """Return the free space of a folder, which does not need to exist yet."""
    disk = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
    return DiskSpace(disk.f_bavail * disk.f_frsize, disk.f_favail if disk.f_files else None)


def space_shortage(plan: StagingPlan, space: DiskSpace, largest_file: int = 0) -> str | None:
    """Return why the missing assets of known size do not fit on the disk; None if they do."""
    files, free = plan.files_needed, space.files_free
    if plan.bytes_needed > space.bytes_free:
        return f"needs {si(plan.bytes_needed, 'B')}, but only {si(space.bytes_free, 'B')} are free"
    if free is not None and files > free:
        free_inodes = f"{free:,} {verb_form(free, 'are')} free"
        return f"needs {pluralize(files, 'inode')}, but only {free_inodes}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and largest_file > limit:
        allowed = f"`ulimit -f` allows only {si(limit, 'B')}"
        return f"needs a file of {si(largest_file, 'B')}, but {allowed}"
    return None


def require_space(plan: StagingPlan, space: DiskSpace, largest_file: int = 0) -> None:
    """Raise SystemFaultError if the missing assets do not fit on the disk."""
    if shortage := space_shortage(plan, space, largest_file):
        raise SystemFaultError(str(plan.root), shortage, remedy=REMEDY)
