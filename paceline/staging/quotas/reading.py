"""The quotas that hold where something is to be written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.staging.quotas.holders import (
    MountedSystem,
    QuotaHolder,
    mounted_system,
    quota_holders,
)
from paceline.staging.quotas.kernel import kernel_limits
from paceline.staging.quotas.limits import QuotaAnswer, QuotaLimit, UnknownQuotaError
from paceline.staging.quotas.programs import gpfs_limits, lustre_limits, nfs_limits

LimitReader = Callable[[Path, MountedSystem, Sequence[QuotaHolder]], list[QuotaLimit]]
READERS: dict[str, LimitReader] = {
    **dict.fromkeys(
        ("ext2", "ext3", "ext4", "xfs", "f2fs", "jfs", "btrfs", "tmpfs"), kernel_limits
    ),
    **dict.fromkeys(("nfs", "nfs4"), nfs_limits),
    "lustre": lustre_limits,
    "gpfs": gpfs_limits,
}
"""By the type of file system; of others nobody is asked, as overlay hides whose quotas hold."""


def read_quotas(folder: Path) -> QuotaAnswer:
    """Limits that hold for what this user writes into a folder that exists; it raises nothing."""
    try:
        system = mounted_system(folder)
        if system.type not in READERS:
            return QuotaAnswer(unknown=f"nobody is asked on {system.type}")
        limits = READERS[system.type](folder, system, quota_holders(folder))
    except UnknownQuotaError as error:
        return QuotaAnswer(unknown=str(error))
    except OSError as error:
        return QuotaAnswer(unknown=f"{folder} cannot be looked at: {error.strerror}")
    return QuotaAnswer(
        tuple(limit for limit in limits if limit.bytes.is_limited or limit.files.is_limited)
    )
