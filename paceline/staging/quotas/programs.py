"""Quotas of shared file systems, by the program that comes with each of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from paceline.core.text import one_line
from paceline.machines.programs import last_line
from paceline.staging.quotas.holders import MountedSystem, QuotaHolder
from paceline.staging.quotas.kernel import seconds_until
from paceline.staging.quotas.limits import (
    NobodyToAskError,
    QuotaAmount,
    QuotaLimit,
    UnknownQuotaError,
)

LIMIT_S = 10.0
MOST_BYTES = 1 << 20
KIB = 1024
GPFS_PROGRAMS = "/usr/lpp/mmfs/bin"
"""Where they lie, which is on the search path of root alone."""
_HALF = r"(\d+)\*?[ \t]+(\d+)[ \t]+(\d+)[ \t]+(\S+)"
"""Used, soft and hard limit, grace; a star is behind what exceeds the soft one."""
_ROW = re.compile(rf"(?:^|[ \t]){_HALF}[ \t]+{_HALF}[ \t]*$", re.MULTILINE)
_HEADING = re.compile(r"^Disk quotas for (?:user|group) .*\(([ug]id \d+)\):", re.MULTILINE)
_GPFS_TYPES = {"user": "USR", "group": "GRP"}
_GPFS_FIGURES = (
    *("blockUsage", "blockQuota", "blockLimit", "blockGrace"),
    *("filesUsage", "filesQuota", "filesLimit", "filesGrace"),
)
_UNIT_S = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}


def nfs_limit(folder: Path, system: MountedSystem, holder: QuotaHolder) -> QuotaLimit | None:
    """The server's limit, which its rquotad tells Linux's `quota`; raises UnknownQuotaError."""
    text = said(["quota", f"-{holder.kind[0]}", "-v", "-w", "-p", "-f", system.point])
    _, *parts = _HEADING.split(text)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    section = sections.get(f"{holder.kind[0]}id {holder.number}", "")
    if section.split() == ["none"]:
        return None
    return _limit(holder, _figures("quota", section or _without_rows(text, holder)))


def lustre_limit(folder: Path, system: MountedSystem, holder: QuotaHolder) -> QuotaLimit | None:
    """The limit that Lustre's `lfs` tells; raises UnknownQuotaError."""
    number = str(holder.number)
    text = said(["lfs", "quota", "-q", f"-{holder.kind[0]}", number, system.point])
    return _limit(holder, _figures("lfs", text))


def lustre_project(folder: Path) -> tuple[QuotaHolder, ...]:
    """The project of a folder on Lustre, if it has one; raises UnknownQuotaError."""
    project = re.match(r"\s*(\d+)\s", said(["lfs", "project", "-d", str(folder)]))
    return (QuotaHolder("project", int(project[1])),) if project and int(project[1]) else ()


def gpfs_limit(folder: Path, system: MountedSystem, holder: QuotaHolder) -> QuotaLimit | None:
    """The limit that Storage Scale's `mmlsquota` tells; raises UnknownQuotaError."""
    program = shutil.which("mmlsquota") or f"{GPFS_PROGRAMS}/mmlsquota"
    name = system.source.removeprefix("/dev/")
    text = said([program, "-Y", f"-{holder.kind[0]}", str(holder.number), name])
    rows = [row for row in _gpfs_rows(text) if row.get("quotaType") == _GPFS_TYPES[holder.kind]]
    if len(rows) != 1:
        why = "quotas of each fileset" if rows else one_line(last_line(text))
        raise UnknownQuotaError(f"mmlsquota says: {why}")
    figures = [rows[0].get(name, "") for name in _GPFS_FIGURES]
    if not all(figures[i].isdecimal() for i in (0, 1, 2, 4, 5, 6)):
        raise UnknownQuotaError("mmlsquota prints another table than is known")
    return _limit(holder, figures)


def said(command: Sequence[str]) -> str:
    """What a program prints, at most `MOST_BYTES` in `LIMIT_S`; raises NobodyToAskError."""
    name = Path(command[0]).name
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        raise NobodyToAskError(f"the program {name} is not there: {error.strerror}") from error
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    limit = threading.Timer(LIMIT_S, end)
    with process:
        limit.start()
        try:
            assert process.stdout
            text = process.stdout.read(MOST_BYTES)
        finally:
            limit.cancel()
            limit.join()
            # Not waited for yet, so that its number is nobody else's.
            os.killpg(process.pid, signal.SIGKILL)
    if late.is_set():
        raise NobodyToAskError(f"{name} says nothing for {LIMIT_S:g} s")
    return text.decode(errors="replace")


def _figures(program: str, text: str) -> Sequence[str]:
    """Used, soft, hard and grace, first of KiB, then of files; raises UnknownQuotaError."""
    row = _ROW.search(text)
    if row is None:
        raise UnknownQuotaError(f"{program} says: {one_line(last_line(text))}")
    return row.groups()


def _without_rows(text: str, holder: QuotaHolder) -> str:
    """What is said of a holder that is not named: of groups `quota` names the user's alone."""
    return f"nothing of {holder}" if _HEADING.search(text) or not text.strip() else text


def _limit(holder: QuotaHolder, figures: Sequence[str]) -> QuotaLimit:
    return QuotaLimit(holder.kind, holder.name, _amount(figures[:4], KIB), _amount(figures[4:], 1))


def _amount(figures: Sequence[str], unit: int) -> QuotaAmount:
    used, soft, hard = (int(figure) * unit for figure in figures[:3])
    return QuotaAmount(used, soft or None, hard or None, _grace_s(figures[3]))


def _grace_s(text: str) -> int | None:
    """`quota -p` names a moment, lfs a time as 6d23h59m, mmlsquota one as 7 days."""
    if text.isdecimal():
        return seconds_until(int(text))
    if text == "expired":
        return 0
    parts = re.findall(r"(\d+)\s*([wdhms])", text)
    return sum(int(count) * _UNIT_S[unit] for count, unit in parts) or None


def _gpfs_rows(text: str) -> list[dict[str, str]]:
    """Rows of `-Y`: fields between colons, named by the heading."""
    table = [line.split(":") for line in text.splitlines() if line.startswith("mmlsquota:")]
    names = next((fields for fields in table if "HEADER" in fields[:3]), [])
    return [
        dict(zip(names, map(unquote, fields), strict=False))
        for fields in table
        if "HEADER" not in fields[:3]
    ]
