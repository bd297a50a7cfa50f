"""Lists of hosts from what names them on this machine: /etc/hosts, Slurm, a file, a text."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from paceline.core.errors import SystemFaultError, UserError, did_you_mean
from paceline.core.host_split import split_rounds
from paceline.core.hosts import Host, check_name, expand, hostfile_text
from paceline.files.documents import write_text
from paceline.machines.slurm import client

ETC_HOSTS = Path("/etc/hosts")
TIME_LIMIT_S = 30.0
"""How long a command of Slurm may take to answer."""
PARTITION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class UnknownJobError(SystemFaultError):
    """Slurm does not know the job (any more)."""


@dataclass(frozen=True)
class Parts:
    """Hosts cut into groups of one size."""

    groups: tuple[tuple[Host, ...], ...]
    left_over: tuple[Host, ...]
    """Hosts that fill no group."""


def from_etc_hosts(pattern: str, path: Path = ETC_HOSTS) -> tuple[Host, ...]:
    """The hosts whose name in `path` holds `pattern`, or matches it where it has `*`, `?` or `[`.

    The first name of a line that matches counts; a host with several addresses counts once. Raises
    UserError when none matches, with the line number for a name that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    hosts: dict[str, Host] = {}
    seen: list[str] = []
    for number, line in enumerate(lines, start=1):
        names = line.partition("#")[0].split()[1:]
        seen += names
        name = next((name for name in names if _matches(name, pattern)), None)
        if name is not None:
            hosts.setdefault(check_name(name, f"{path}:{number}"), Host(name=name))
    if not hosts:
        raise UserError(
            str(path), f"no host matches {pattern!r}", remedy=did_you_mean(pattern, seen) or None
        )
    return tuple(hosts.values())


def from_allocation(job: str) -> tuple[Host, ...]:
    """The hosts of a running Slurm job; raises UserError where it has none (yet)."""
    nodes = _answer(["squeue", "--noheader", "--jobs", job, "--states=running", "--format=%N"])
    names = expand(",".join(nodes.split()), f"job {job}")
    if not names:
        raise UserError(f"job {job}", "has no hosts: it does not run", remedy="squeue --me")
    return tuple(Host(name=name) for name in dict.fromkeys(names))


def from_partition(partition: str | None = None) -> tuple[Host, ...]:
    """The idle hosts of a partition, of all without one; raises UserError when none is idle."""
    if partition is not None and not PARTITION.fullmatch(partition):
        raise UserError("partition", f"{partition!r} is no name of one")
    options = [f"--partition={partition}"] if partition else []
    listing = _answer(["sinfo", "--noheader", "--format=%t %N", *options])
    # sinfo's own --states=idle also takes drained nodes, and those that do not answer (`idle*`).
    lines = (line.split() for line in listing.splitlines())
    idle = [line[1] for line in lines if len(line) == 2 and line[0] == "idle"]
    names = expand(",".join(idle), "sinfo")
    if not names:
        raise UserError(
            f"partition {partition}" if partition else "sinfo",
            "has no idle node",
            remedy="sinfo tells the nodes' states",
        )
    return tuple(Host(name=name) for name in dict.fromkeys(names))


def cut(hosts: Sequence[Host], size: int) -> Parts:
    """Neighbours in groups of `size`, and who is left over; raises UserError for an empty group."""
    by_name = {host.name: host for host in hosts}
    first = split_rounds([host.name for host in hosts], size)[0]
    groups = tuple(tuple(by_name[name] for name in group) for group in first.groups)
    return Parts(groups, tuple(by_name[name] for name in first.left_over))


def write_groups(parts: Parts, folder: Path) -> tuple[Path, ...]:
    """One hostfile a group, `hosts-SIZE-NNNN.txt`, in a new or empty folder; their paths.

    Raises UserError when the folder holds something: an old group beside new ones would run too.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = next(folder.iterdir(), None)
    except OSError as error:
        raise UserError(str(folder), f"cannot be a folder: {error.strerror}") from error
    if occupied is not None:
        raise UserError(str(folder), f"holds {occupied.name}", remedy="name a new folder")
    paths = [
        folder / f"hosts-{len(group)}-{number:04d}.txt"
        for number, group in enumerate(parts.groups, start=1)
    ]
    for path, group in zip(paths, parts.groups, strict=True):
        write_text(path, hostfile_text(group))
    return tuple(paths)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) if re.search(r"[*?\[]", pattern) else pattern in name


def _answer(command: list[str]) -> str:
    """What a command of Slurm prints; raises SystemFaultError where it is missing or fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=False,
            env=client.environment({}),
        )
    except FileNotFoundError as error:
        raise SystemFaultError(command[0], "is not installed here") from error
    except subprocess.TimeoutExpired as error:
        raise SystemFaultError(command[0], f"did not answer in {TIME_LIMIT_S:.0f} s") from error
    if done.returncode:
        messages = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        unknown = client.NO_SUCH_JOB in done.stderr
        raise (UnknownJobError if unknown else SystemFaultError)(command[0], messages[0])
    return done.stdout
