"""The quotas that hold where something is to be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.staging.quotas.holders import (
    MountedSystem,
    QuotaHolder,
    mounted_system,
    quota_holders,
)
from paceline.staging.quotas.kernel import kernel_limit
from paceline.staging.quotas.limits import (
    NobodyToAskError,
    QuotaAnswer,
    QuotaLimit,
    UnknownQuotaError,
)
from paceline.staging.quotas.programs import (
    gpfs_limit,
    lustre_limit,
    lustre_project,
    nfs_limit,
)

LimitReader = Callable[[Path, MountedSystem, QuotaHolder], QuotaLimit | None]
READERS: dict[str, LimitReader] = {
    **dict.fromkeys(("ext2", "ext3", "ext4", "xfs", "f2fs", "jfs", "tmpfs"), kernel_limit),
    **dict.fromkeys(("nfs", "nfs4"), nfs_limit),
    "lustre": lustre_limit,
    "gpfs": gpfs_limit,
}
"""By the type of file system; of others nobody is asked: overlay hides whose quotas hold, and
quotactl does not know the qgroups of btrfs."""


def read_quotas(folder: Path) -> QuotaAnswer:
    """Limits that hold for what this user writes into a folder that exists; it raises nothing."""
    limits: list[QuotaLimit] = []
    unknown: list[str] = []
    try:
        system = mounted_system(folder)
        if system.type not in READERS:
            raise NobodyToAskError(f"nobody is asked on {system.type}")
        holders = quota_holders(folder, system)
        if system.type == "lustre":
            holders += lustre_project(folder)
        for holder in holders:
            try:
                limit = READERS[system.type](folder, system, holder)
            except NobodyToAskError:
                raise
            except UnknownQuotaError as error:
                unknown.append(str(error))
            else:
                limits += [limit] if limit and limit.is_limited else []
    except UnknownQuotaError as error:
        unknown.append(str(error))
    except OSError as error:
        unknown.append(f"{folder} cannot be looked at: {error.strerror}")
    return QuotaAnswer(tuple(limits), "; ".join(unknown) or None)
