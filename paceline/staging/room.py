"""Room where something is staged: of the disk, and of the quotas that hold there."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import SystemFaultError
from paceline.core.units import agreeing, counted, si
from paceline.staging.outline import StageOutline
from paceline.staging.quotas.limits import QuotaAmount, QuotaAnswer, QuotaLimit
from paceline.staging.quotas.reading import read_quotas

REMEDY = "make room, or give another place with --to"


@dataclass(frozen=True)
class StageRoom:
    """What may still be written into a stage folder."""

    bytes_free: int
    """Of the disk, for this user."""
    files_free: int | None
    """None where the file system has no limit of them."""
    quotas: QuotaAnswer


def stage_room(folder: Path) -> StageRoom:
    """The room of a folder, which need not exist yet."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    disk = os.statvfs(place)
    return StageRoom(
        bytes_free=disk.f_bavail * disk.f_frsize,
        files_free=disk.f_favail if disk.f_files else None,
        quotas=read_quotas(place),
    )


def refuse_without_room(
    outline: StageOutline, room: StageRoom, largest_file: int | None = None
) -> None:
    """Raise SystemFaultError where the disk, a quota or a limit has no room for what is to come."""
    where, need, files = str(outline.root), outline.bytes_needed, outline.files_needed
    if need > room.bytes_free:
        problem = f"{si(need, 'B')} are to come and {si(room.bytes_free, 'B')} are free"
        raise SystemFaultError(where, problem, remedy=REMEDY)
    if room.files_free is not None and files > room.files_free:
        problem = (
            f"{counted(files, 'file', 'are')} to come and {room.files_free:,} "
            f"{agreeing(room.files_free, 'are')} free (inodes)"
        )
        raise SystemFaultError(where, problem, remedy=REMEDY)
    for limit in room.quotas.limits:
        for amount, more, unit in _amounts(outline, limit):
            if more and amount.left is not None and more > amount.left:
                raise SystemFaultError(
                    where,
                    f"{_so_much(more, unit)} are to come and the quota of {limit} leaves "
                    f"{_so_much(amount.left, unit)}",
                    allowed=_allowed(amount, unit),
                    remedy=REMEDY,
                )
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest_file and most != resource.RLIM_INFINITY and largest_file > most:
        raise SystemFaultError(
            where,
            f"a file of {si(largest_file, 'B')} is to come, none may exceed {si(most, 'B')}",
            remedy="see `ulimit -f`",
        )


def lack_of_room(outline: StageOutline, room: StageRoom) -> str | None:
    """Why a staging would be refused now, by the sizes that are known; None where it would not."""
    try:
        refuse_without_room(outline, room)
    except SystemFaultError as error:
        return str(error)
    return None


def soft_limit_notes(outline: StageOutline, room: StageRoom) -> tuple[str, ...]:
    """What will exceed a soft limit, which refuses nothing before its grace time ends."""
    return tuple(
        f"{_so_much(more, unit)} more exceed the soft limit of {limit} "
        f"({_so_much(amount.soft or 0, unit)}): no more can be written when its grace time ends"
        for limit in room.quotas.limits
        for amount, more, unit in _amounts(outline, limit)
        if amount.exceeds_soft(more)
    )


def quota_sentences(room: StageRoom) -> tuple[str, ...]:
    """What each quota leaves, and what is not known of them."""
    told = [
        f"the quota of {limit} leaves {_left(limit)}"
        for limit in room.quotas.limits
        if limit.bytes.left is not None or limit.files.left is not None
    ]
    unknown = room.quotas.unknown
    return (*told, f"quotas are not known: {unknown}") if unknown else tuple(told)


def quota_row(limit: QuotaLimit) -> dict[str, Any]:
    """A limit for JSON: bytes and files, each with what is used and what is left."""
    return {
        "kind": limit.kind,
        "name": limit.name,
        **{
            name: {
                "used": amount.used,
                "soft_limit": amount.soft,
                "limit": amount.hard,
                "grace_seconds": amount.grace_s,
                "left": amount.left,
            }
            for name, amount in (("bytes", limit.bytes), ("files", limit.files))
        },
    }


def _amounts(outline: StageOutline, limit: QuotaLimit) -> Iterator[tuple[QuotaAmount, int, str]]:
    yield limit.bytes, outline.bytes_needed, "B"
    yield limit.files, outline.files_needed, "files"


def _left(limit: QuotaLimit) -> str:
    parts = ((limit.bytes.left, "B"), (limit.files.left, "files"))
    return " and ".join(_so_much(left, unit) for left, unit in parts if left is not None)


def _allowed(amount: QuotaAmount, unit: str) -> str:
    limit, word = amount.hard, "limit"
    if amount.grace_s == 0 and amount.soft is not None:
        limit, word = amount.soft, "soft limit, whose grace time is over"
    return f"{_so_much(limit or 0, unit)} ({word}), {_so_much(amount.used, unit)} are used"


def _so_much(amount: int, unit: str) -> str:
    if unit == "B":
        return si(amount, "B")
    return counted(amount, "file")
