"""What quotas leave of a local file system; quotactl is played by bytes as Linux lays them out."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.staging.quotas import holders, reading
from paceline.staging.quotas.holders import MountedSystem, QuotaHolder, quota_holders
from paceline.staging.quotas.kernel import kernel_limit
from paceline.staging.quotas.limits import NobodyToAskError, QuotaAmount, QuotaLimit

USER, GROUP = QuotaHolder("user", 1000), QuotaHolder("group", 100)
XFS = MountedSystem("/", "xfs", "/dev/vda")
COUNTED, USER_HELD, GROUP_HELD = 0b101, 0b10, 0b1000
"""Flags of linux/dqblk_xfs.h."""
NINE_KIB = struct.pack("=8QI", 9, *[0] * 7, 63)
"""struct if_dqblk of linux/quota.h."""
EVERYTHING = "000001ffffffffff"
DOCKER = "00000000a80425fb"
HOST = "         0          0 4294967295\n"
MAPPED = "         0       1000          1\n"


class PlayedKernel:
    """The system call of Linux 5.14, which answers with bytes or an error number."""

    def __init__(
        self, state: bytes | int, of_user: bytes | int, of_group: bytes | int = errno.ESRCH
    ) -> None:
        self.answers = {0x580500: state, 0x80000700: of_user, 0x80000701: of_group}
        self.numbers: list[int] = []

    def syscall(self, _number: int, handle: int, command: Any, number: Any, answer: Any) -> int:
        """0, or -1 and errno."""
        content = errno.EBADF if handle < 0 else self.answers[command.value]
        if isinstance(content, int):
            ctypes.set_errno(content)
            return -1
        self.numbers.append(number.value)
        ctypes.memmove(answer, content, len(content))
        return 0


def state(flags: int) -> bytes:
    """Begin of struct fs_quota_stat."""
    return struct.pack("=bxH", 1, flags)


def asked(
    monkeypatch: pytest.MonkeyPatch, folder: Path, holder: QuotaHolder, kernel: PlayedKernel
) -> QuotaLimit | None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: kernel)
    return kernel_limit(folder, XFS, holder)


def test_limits_are_in_kib_and_what_is_used_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    until = int(time.time()) + 3600
    figures = struct.pack("=8QI", 300, 200, 204_801, 0, 40, 41, until, 1, 63)
    kernel = PlayedKernel(state(COUNTED | USER_HELD), figures)
    limit = asked(monkeypatch, tmp_path, USER, kernel)
    assert limit is not None and limit.kind == "user" and kernel.numbers == [0, 1000]
    assert (limit.bytes.used, limit.bytes.soft, limit.bytes.hard) == (204_801, 204_800, 307_200)
    assert limit.bytes.grace_s is not None and 3000 < limit.bytes.grace_s <= 3600
    assert limit.files == QuotaAmount(41, 40, None, 0)


@pytest.mark.parametrize(
    ("flags", "held"),
    [
        (COUNTED, []),
        (COUNTED | USER_HELD, [USER]),
        (COUNTED | GROUP_HELD, [GROUP]),
        (COUNTED | USER_HELD | GROUP_HELD, [USER, GROUP]),
    ],
)
def test_limits_that_are_only_counted_hold_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, held: list[QuotaHolder]
):
    kernel = PlayedKernel(state(flags), NINE_KIB, NINE_KIB)
    assert held == [
        holder for holder in (USER, GROUP) if asked(monkeypatch, tmp_path, holder, kernel)
    ]


@pytest.mark.parametrize(
    ("answers", "is_unknown"),
    [
        ((errno.ENOSYS, 0), False),
        ((state(USER_HELD), errno.ESRCH), False),
        ((errno.ENOENT, 0), True),
        ((state(USER_HELD), errno.EPERM), True),
    ],
)
def test_a_kernel_that_refuses_leaves_a_quota_unknown_unless_there_is_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: tuple[bytes | int, bytes | int],
    is_unknown: bool,
):
    kernel = PlayedKernel(*answers)
    if not is_unknown:
        assert asked(monkeypatch, tmp_path, USER, kernel) is None
        return
    with pytest.raises(NobodyToAskError, match="the kernel does not tell them"):
        asked(monkeypatch, tmp_path, USER, kernel)


def test_a_user_who_has_no_file_on_xfs_yet_leaves_the_group_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kernel = PlayedKernel(state(USER_HELD | GROUP_HELD), errno.ENOENT, NINE_KIB)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: kernel)
    monkeypatch.setattr(reading, "mounted_system", lambda _: XFS)
    monkeypatch.setattr(reading, "quota_holders", lambda *_: (USER, GROUP))
    answer = reading.read_quotas(tmp_path)
    assert [(limit.kind, limit.bytes.left) for limit in answer.limits] == [("group", 9 << 10)]
    assert f"{USER} has nothing there yet" in str(answer.unknown)


@pytest.mark.parametrize(
    ("kind", "numbers", "capabilities", "users", "held"),
    [
        ("ext4", (1000, 100), "0", HOST, ["user 1000", "group 100"]),
        ("ext4", (0, 0), EVERYTHING, HOST, []),
        ("ext4", (0, 7), DOCKER, HOST, ["user 0", "group 7"]),
        ("ext4", (0, 0), EVERYTHING, MAPPED, ["user 0", "group 0"]),
        ("nfs4", (0, 0), EVERYTHING, HOST, []),
        ("xfs", (1000, 100), EVERYTHING, HOST, ["user 1000", "group 100"]),
        ("xfs", (1000, 0), "0", HOST, ["user 1000"]),
        ("xfs", (0, 7), EVERYTHING, HOST, ["group 7"]),
        ("xfs", (0, 0), EVERYTHING, HOST, []),
        ("xfs", (0, 0), EVERYTHING, MAPPED, ["user 0", "group 0"]),
    ],
)
def test_who_is_held_to_no_limit_is_not_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    numbers: tuple[int, int],
    capabilities: str,
    users: str,
    held: list[str],
):
    for name, text in {"STATUS": f"CapEff:\t{capabilities}\n", "USER_NUMBERS": users}.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(holders, name, tmp_path / name)
    monkeypatch.setattr(os, "geteuid", lambda: numbers[0])
    monkeypatch.setattr(os, "getegid", lambda: numbers[1])
    shown = quota_holders(tmp_path, MountedSystem("/", kind, "/dev/vda"))
    assert [f"{holder.kind} {holder.number}" for holder in shown] == held


def test_a_new_file_in_a_setgid_folder_counts_for_the_group_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    group = tmp_path.stat().st_gid
    monkeypatch.setattr(os, "getegid", lambda: group + 1)
    monkeypatch.setattr(holders, "STATUS", tmp_path / "status")
    (tmp_path / "status").write_text("CapEff:\t0\n")
    for mode, number in ((0o755, group + 1), (0o2755, group)):
        tmp_path.chmod(mode)
        _, shown = quota_holders(tmp_path, MountedSystem("/", "ext4", "/dev/vda"))
        assert shown == QuotaHolder("group", number)
