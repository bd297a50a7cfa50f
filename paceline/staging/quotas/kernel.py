"""Quotas of local file systems, which the kernel tells anybody of himself: quotactl(2)."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.staging.quotas.holders import MountedSystem, QuotaHolder
from paceline.staging.quotas.limits import (
    NobodyToAskError,
    QuotaAmount,
    QuotaLimit,
    UnknownQuotaError,
)

KINDS = {"user": 0, "group": 1}
"""USRQUOTA and GRPQUOTA of linux/quota.h."""
ENFORCED = {"user": 1 << 1, "group": 1 << 3}
"""FS_QUOTA_UDQ_ENFD and FS_QUOTA_GDQ_ENFD of linux/dqblk_xfs.h."""
_GET_QUOTA, _GET_STATE = 0x800007, 0x5805
"""Q_GETQUOTA of linux/quota.h and Q_XGETQSTAT of linux/dqblk_xfs.h, which all of them answer."""
_QUOTACTL_FD = 443
"""System call of Linux 5.14 on every architecture; it takes a folder, the older one a device."""
_NO_QUOTAS = (errno.ENOSYS, errno.ESRCH)
_LIMIT_BLOCK_BYTES = 1024


class _Figures(ctypes.Structure):
    """struct if_dqblk of linux/quota.h."""

    _fields_ = (
        ("hard_blocks", ctypes.c_uint64),
        ("soft_blocks", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("hard_files", ctypes.c_uint64),
        ("soft_files", ctypes.c_uint64),
        ("files", ctypes.c_uint64),
        ("bytes_until", ctypes.c_uint64),
        ("files_until", ctypes.c_uint64),
        ("valid", ctypes.c_uint32),
    )


class _State(ctypes.Structure):
    """Begin of struct fs_quota_stat of linux/dqblk_xfs.h, with room for all of it."""

    _fields_ = (
        ("version", ctypes.c_int8),
        ("flags", ctypes.c_uint16),
        ("rest", ctypes.c_uint8 * 252),
    )


def kernel_limit(folder: Path, system: MountedSystem, holder: QuotaHolder) -> QuotaLimit | None:
    """The limit that the kernel enforces on a local file system; raises UnknownQuotaError."""
    if sys.platform != "linux":
        raise NobodyToAskError(f"{sys.platform} is not asked")
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ask = _question(handle, system.source)
        state = _State()
        if not ask(_GET_STATE << 8, 0, state) or not state.flags & ENFORCED[holder.kind]:
            return None
        return _limit(ask, holder)
    except OSError as error:
        raise NobodyToAskError(f"the kernel does not tell them: {error.strerror}") from error
    finally:
        os.close(handle)


def _question(handle: int, device: str) -> Callable[[int, int, Any], bool]:
    """A function that fills its last argument; False where no quotas are, else raises OSError."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    is_new = libc.syscall(_QUOTACTL_FD, -1, 0, 0, None) and ctypes.get_errno() != errno.ENOSYS

    def ask(command: int, number: int, answer: ctypes.Structure) -> bool:
        words = ctypes.c_uint(command), ctypes.c_uint(number), ctypes.byref(answer)
        if is_new:
            failed = libc.syscall(_QUOTACTL_FD, handle, *words)
        elif not device.startswith("/"):
            return False  # Kernels that old know quotas of devices alone.
        else:
            failed = libc.quotactl(words[0], os.fsencode(device), *words[1:])
        if failed and (code := ctypes.get_errno()) not in _NO_QUOTAS:
            raise OSError(code, os.strerror(code))
        return not failed

    return ask


def _limit(ask: Callable[[int, int, Any], bool], holder: QuotaHolder) -> QuotaLimit | None:
    figures = _Figures()
    try:
        if not ask(_GET_QUOTA << 8 | KINDS[holder.kind], holder.number, figures):
            return None
    except FileNotFoundError as error:
        why = "has nothing there yet; a default limit may hold, which the kernel does not tell"
        raise UnknownQuotaError(f"{holder} {why}") from error
    soft, hard = figures.soft_blocks, figures.hard_blocks
    return QuotaLimit(
        holder.kind,
        holder.name,
        QuotaAmount(
            figures.bytes,
            soft * _LIMIT_BLOCK_BYTES or None,
            hard * _LIMIT_BLOCK_BYTES or None,
            seconds_until(figures.bytes_until),
        ),
        QuotaAmount(
            figures.files,
            figures.soft_files or None,
            figures.hard_files or None,
            seconds_until(figures.files_until),
        ),
    )


def seconds_until(moment: int) -> int | None:
    """Seconds to a moment since 1970, 0 where it is over; None for 0, where no time runs."""
    return max(0, int(moment - time.time())) if moment else None
