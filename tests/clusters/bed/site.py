"""The ground that a bed stands on: its folder, its bridge, and the process its life hangs on.

Every process of a bed is in one pid namespace. Its first process is the anchor: when that ends,
the kernel ends all the others. The anchor of a test run reads a pipe that nobody writes to and
ends when the pipe closes, so it outlives the test run in no way of dying.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path

from tests.clusters.bed.groups import Groups
from tests.clusters.bed.process import BedError, Process, call, spawn
from tests.waiting import wait_until

BEDS = Path("/tmp/paceline-beds")
"""One folder a bed; open to all users, because Slurm's database runs as a user of its own."""
NETWORK = IPv4Address("198.18.0.0")
"""Set aside for benchmarks by RFC 2544, so no real network is hidden; a bed takes 256 addresses."""
MAX_BEDS = 200
MAX_HOSTS = 250
HEAD, OUTSIDE = 253, 254
"""Last parts of the addresses of Slurm's controller and of the machine itself."""
INTERFACES = Path("/sys/class/net")
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")


@dataclass
class Site:
    """What a bed owns on this machine."""

    name: str
    slot: int
    anchor: Process
    starter: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    """Parent of the anchor, where this very process started it."""

    @property
    def folder(self) -> Path:
        """Everything that the bed writes."""
        return BEDS / self.name

    @property
    def bridge(self) -> str:
        """The switch that all hosts are plugged into."""
        return f"pb{self.slot}"

    def address(self, index: int) -> str:
        """The address of host number `index`."""
        return str(NETWORK + self.slot * 256 + index)

    def cable(self, index: int) -> str:
        """The outer end of a host's network cable."""
        return f"{self.bridge}n{index}"

    def groups(self, host: str) -> Groups:
        """The control groups of one host."""
        return Groups(f"paceline-bed-{self.name}/{host}")

    @property
    def up(self) -> bool:
        """True until the anchor dies, even while frozen processes keep it from ending."""
        return self.anchor.alive and not self.anchor.ending

    def remove(self) -> None:
        """Ends every process of the bed and gives back all that it owned."""
        with _lock():
            if self.anchor in [site.anchor for site in beds()]:
                self.clear()
        if self.starter:
            if self.starter.stdin:
                self.starter.stdin.close()
            self.starter.wait()

    def clear(self) -> None:
        """What `remove` does, for one who holds the lock."""
        self.anchor.kill()
        groups = [self.groups(path.name) for path in (self.folder / "hosts").glob("*")]
        for group in groups:
            group.freeze(frozen=False)  # the kernel cannot end what is frozen
        self.anchor.wait(30)
        for group in groups:
            group.remove()
        if (INTERFACES / self.bridge).exists():
            call(["ip", "link", "delete", self.bridge])
        shutil.rmtree(self.folder)


def claim(name: str, *, tied: bool) -> Site:
    """A new site; `tied` lets it end with this process. Clears away what dead beds left.

    Raises BedError where a bed of that name is up or this machine has no bridges or namespaces.
    """
    if not NAME.fullmatch(name):
        raise BedError(f"{name!r} cannot name a bed: lower-case letters, digits and -, at most 31")
    with _lock():
        for old in beds():
            if not old.up:
                old.clear()
        folder = BEDS / name
        if (folder / "site").exists():
            raise BedError(f"a bed named {name} is up already")
        shutil.rmtree(folder, ignore_errors=True)
        for sub in ("hosts", "log", "shared"):
            (folder / sub).mkdir(parents=True)
        starter = _start_anchor(folder / "log" / "anchor", tied=tied)
        site = Site(name, _free_slot(), _anchor(starter), starter)
        (folder / "site").write_text(f"{site.slot} {site.anchor.pid} {site.anchor.start}\n")
        try:
            _lay_bridge(site)
        except BedError:
            site.clear()
            raise
        return site


def beds() -> list[Site]:
    """The sites that stand recorded, those of dead beds included."""
    sites: list[Site] = []
    for file in sorted(BEDS.glob("*/site")):
        with suppress(FileNotFoundError):
            slot, pid, start = file.read_text().split()
            sites.append(Site(file.parent.name, int(slot), Process(int(pid), start)))
    return sites


def find(name: str) -> Site:
    """The site of a bed that is up; raises BedError where there is none."""
    for site in beds():
        if site.name == name and site.up:
            return site
    up = ", ".join(site.name for site in beds() if site.up) or "none"
    raise BedError(f"no bed named {name} is up; up are: {up}")


@contextmanager
def _lock() -> Iterator[None]:
    BEDS.mkdir(mode=0o755, exist_ok=True)
    if BEDS.stat().st_uid != os.getuid():
        raise BedError(f"{BEDS} belongs to somebody else")
    with (BEDS / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start_anchor(log: Path, *, tied: bool) -> subprocess.Popen[bytes]:
    # Ignoring SIGCHLD, it leaves no zombies of the orphans that fall to it.
    first = ["cat"] if tied else ["sleep", "infinity"]
    inside = ["unshare", "--pid", "--fork", "--kill-child", "env", "--ignore-signal=CHLD"]
    return spawn([*inside, *first], log, stdin=subprocess.PIPE if tied else subprocess.DEVNULL)


def _anchor(starter: subprocess.Popen[bytes]) -> Process:
    parent = Process.of(starter.pid)
    if parent is None:
        raise BedError("this machine lets no process have a pid namespace")
    wait_until(lambda: parent.children or starter.poll() is not None, "the anchor")
    anchor = Process.of(parent.children[0]) if parent.children else None
    if anchor is None:
        raise BedError("this machine lets no process have a pid namespace")
    return anchor


def _free_slot() -> int:
    taken = {path.name.partition("n")[0] for path in INTERFACES.glob("pb*")}
    taken |= {site.bridge for site in beds()}
    return next(slot for slot in range(MAX_BEDS) if f"pb{slot}" not in taken)


def _lay_bridge(site: Site) -> None:
    lines = [
        f"link add {site.bridge} type bridge forward_delay 0",
        f"address add {site.address(OUTSIDE)}/24 dev {site.bridge}",
        f"link set {site.bridge} up",
    ]
    call(["ip", "-batch", "-"], "\n".join(lines))
