"""A virtual host: a process with its own network, pids, mounts and host name, and its faults.

The file system is the machine's, which plays the part of the storage that a cluster shares; /run,
/dev/shm, /etc/hosts and /etc/resolv.conf are private.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clusters.bed.process import BedError, Process, call, spawn
from tests.clusters.bed.site import INTERFACES, OUTSIDE, Site
from tests.waiting import wait_until

DISK = "bed-disk"
"""Name of the small disks in a host's table of mounts."""
DAEMONS = ("sshd: /usr/sbin/sshd", "slurmd -N", "/usr/sbin/slurmd -N")
"""How the command lines begin of what belongs on a host."""
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
FIRST_PROCESS = r"""
set -e
hostname "$1"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
# /sys shows the network of the process that mounted it; the control groups are mounted again.
mkdir -p "$2/cgroup"
mount --rbind /sys/fs/cgroup "$2/cgroup"
if mount -t sysfs sysfs /sys; then mount --rbind "$2/cgroup" /sys/fs/cgroup; fi
mount --bind "$3" /etc/hosts
# Torch asks for the names of addresses, and waits 10 s for a name server that nobody reaches.
printf 'nameserver 127.0.0.1\noptions timeout:1 attempts:1\n' > "$2/resolv.conf"
if [ -f /etc/resolv.conf ]; then mount --bind "$2/resolv.conf" /etc/resolv.conf; fi
# bash reads it at every log-in; what it does there for people takes time and waits for locks.
if [ -f ~/.bashrc ]; then mount --bind /dev/null ~/.bashrc; fi
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
ip link set lo up
: > "$2/ready"
exec env --ignore-signal=CHLD sleep infinity
"""
ENTER = 'for g in $1; do echo 0 > "$g/cgroup.procs"; done; shift; exec "$@"'


@dataclass
class Host:
    """One host of a bed. A new object for the same host finds it by the files in its folder."""

    site: Site
    name: str
    index: int
    started: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False)
    """Children of this very process that live in the host, to be reaped when it ends."""

    def __post_init__(self) -> None:
        self.address = self.site.address(self.index)
        self.folder = self.site.folder / "hosts" / self.name
        self.groups = self.site.groups(self.name)

    @property
    def first(self) -> Process | None:
        """Its first process, seen from outside; None when the host is not running."""
        with suppress(FileNotFoundError):
            pid, start = (self.folder / "first").read_text().split()
            process = Process(int(pid), start)
            return process if process.alive else None
        return None

    @property
    def up(self) -> bool:
        """True from boot to crash."""
        return self.first is not None

    def begin_boot(self) -> None:
        """Starts its first process; `end_boot` waits for it, so that many can boot at once."""
        if self.up:
            raise BedError(f"{self.name} is running already")
        self.folder.mkdir(exist_ok=True)
        (self.folder / "ready").unlink(missing_ok=True)
        self.groups.make()
        inside = ["nsenter", f"--pid=/proc/{self.site.anchor.pid}/ns/pid", "unshare"]
        inside += [*NAMESPACES, "--fork", "--mount-proc", "sh", "-c", FIRST_PROCESS, "bed"]
        inside += [self.name, str(self.folder), str(self.site.folder / "hosts.txt")]
        self.started.append(spawn(self._joined(inside), self.folder / "boot.log"))

    def end_boot(self) -> None:
        """Waits until the host is ready and plugs in its network cable."""
        starter = self.started[-1]
        ready = self.folder / "ready"
        wait_until(lambda: ready.exists() or starter.poll() is not None, f"{self.name} to boot")
        last = Process.of(starter.pid)
        while last and last.children:
            last = Process.of(last.children[0])
        if last is None or last.pid == starter.pid:
            raise BedError(f"{self.name} did not boot: {(self.folder / 'boot.log').read_text()}")
        (self.folder / "first").write_text(f"{last.pid} {last.start}\n")
        self._lay_cable(last.pid)

    def crash(self) -> None:
        """A power cut: neighbours see silence first, then every process is gone."""
        first = self.first
        if first is None:
            return
        self.unplug()
        first.kill()
        with suppress(BedError):
            self.groups.freeze(frozen=False)
        first.wait()
        self.reap()
        self._remove_cable()

    def keep(self, child: subprocess.Popen[bytes]) -> None:
        """Lets `reap` wait for a child that runs as long as the host."""
        self.started.append(child)

    def reap(self) -> None:
        """Waits for the children of this process; the host has ended."""
        while self.started:
            self.started.pop().wait()

    def argv(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` inside the host, from /."""
        first = self.first
        if first is None:
            raise BedError(f"{self.name} is not running")
        return self._joined(["nsenter", "-t", str(first.pid), *NAMESPACES, "--", *argv])

    def run(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """What a program came to inside the host; options as of subprocess.run."""
        settings = {"text": True, "capture_output": True, "check": False, **options}
        return subprocess.run(self.argv(argv), **settings)

    def call(self, *argv: str) -> str:
        """What a program printed inside the host; raises BedError when it fails."""
        return call(self.argv(argv))

    def unplug(self) -> None:
        """Pulls the network cable."""
        call(["ip", "link", "set", self.site.cable(self.index), "down"])

    def plug(self) -> None:
        """Puts the network cable back."""
        call(["ip", "link", "set", self.site.cable(self.index), "up"])

    def freeze(self) -> None:
        """Stops every process: connections stay open and nothing answers."""
        self.groups.freeze(frozen=True)

    def thaw(self) -> None:
        """Lets the processes go on."""
        self.groups.freeze(frozen=False)

    def limit(self, cores: float | None) -> None:
        """Limit the processors of the whole host; None removes the limit."""
        self.groups.limit(cores)

    def fill_disk(self, folder: Path, free_bytes: int = 0) -> None:
        """Puts a disk with `free_bytes` of room, rounded up to pages, over `folder`, here alone.

        What the folder held is out of sight until `uncover`.
        """
        size = max(free_bytes, 4096)
        self.call("mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", DISK, str(folder))
        if free_bytes == 0:
            self.call("dd", "if=/dev/zero", f"of={folder}/ballast", "bs=4096", "count=1")

    def cover(self, file: Path, text: str) -> None:
        """Lets this host alone see `text` as an existing `file`, as executable as that is."""
        cover = self.folder / f"cover-{file.name}"
        cover.write_text(text)
        cover.chmod(file.stat().st_mode)
        self.call("mount", "--bind", str(cover), str(file))

    def uncover(self, path: Path) -> None:
        """Takes away a disk of `fill_disk` or a file of `cover`."""
        self.call("umount", "--lazy", str(path))

    def covered(self) -> list[Path]:
        """Where such disks and files lie, the latest first."""
        first = self.first
        lines = Path(f"/proc/{first.pid}/mountinfo").read_text().splitlines() if first else []
        split = [line.split() for line in lines]
        ours = [f[4] for f in split if DISK in f or f"/{self.name}/cover-" in f[3]]
        return [
            Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), path)) for path in ours[::-1]
        ]

    def processes(self) -> dict[int, str]:
        """Command lines by outer pid of all that runs inside, without its first process."""
        first = self.first
        if first is None:
            return {}
        name_space = Path(f"/proc/{first.pid}/ns/pid").readlink()
        command_lines: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if int(folder.name) != first.pid and (folder / "ns/pid").readlink() == name_space:
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    command_lines[int(folder.name)] = line
        return command_lines

    def leftovers(self) -> dict[int, str]:
        """Processes of the host except the daemons of the bed."""
        return {p: line for p, line in self.processes().items() if not line.startswith(DAEMONS)}

    def _joined(self, argv: Sequence[str]) -> list[str]:
        folders = " ".join(str(f) for f in self.groups.folders if f.is_dir())
        return ["sh", "-c", ENTER, "bed", folders, *argv]

    def _lay_cable(self, pid: int) -> None:
        self._remove_cable()
        cable, slot, index = self.site.cable(self.index), self.site.slot, self.index
        # A fixed hardware address: with a new one after a crash, neighbours would keep the old.
        end = f"peer name eth0 netns {pid} address 02:00:5e:00:{slot:02x}:{index:02x}"
        call(["ip", "link", "add", cable, "master", self.site.bridge, "type", "veth", *end.split()])
        self.plug()
        setup = f"address add {self.address}/24 dev eth0\nlink set eth0 up\n"
        setup += f"route add default via {self.site.address(OUTSIDE)}\n"
        call(["nsenter", "-t", str(pid), "--net", "ip", "-batch", "-"], setup)

    def _remove_cable(self) -> None:
        cable = self.site.cable(self.index)
        try:
            call(["ip", "link", "delete", cable])
        except BedError:
            # It goes by itself a while after the last process of the host.
            if (INTERFACES / cable).exists():
                raise
