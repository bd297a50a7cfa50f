"""Control groups of a host: its share of the processors, and stopping all of it at once."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.clusters.bed.process import BedError
from tests.waiting import wait_until

PERIOD_US = 10_000
"""Bursts shorter than quota x period are never slowed: the usual 100 ms would hide small steps."""
MIN_QUOTA_US = 1_000
"""What the kernel accepts at least."""
FAVOURED_SHARES, FAVOURED_WEIGHT = 262_144, 10_000
"""The most that version 1 and version 2 take; an ordinary process has 1,024 and a group 100."""
NOWHERE = Path("/no-control-groups")


@cache
def mounts() -> dict[str, Path]:
    """Where the version 1 controllers are mounted, and `unified`, version 2."""
    folders: dict[str, Path] = {}
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup":
            folders |= {name: Path(folder) for name in options.split(",")}
        elif kind == "cgroup2":
            folders["unified"] = Path(folder)
    return folders


@dataclass(frozen=True)
class Groups:
    """The groups of one host, in every hierarchy that is needed."""

    name: str
    """Folder below each hierarchy's top, for example paceline-bed-x/node-001."""

    @property
    def folders(self) -> list[Path]:
        """Those that exist on this machine; a process joins by its pid in their cgroup.procs."""
        tops = {mounts()[n] for n in ("cpu", "freezer") if n in mounts()}
        if "unified" in mounts() and not {"cpu", "freezer"} <= set(mounts()):
            tops.add(mounts()["unified"])
        return [top / self.name for top in sorted(tops)]

    def make(self) -> None:
        """Creates the folders; a hierarchy that cannot be written is left out."""
        for folder in self.folders:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                if folder.is_relative_to(mounts().get("unified", NOWHERE)):
                    for above in (folder.parents[1], folder.parent):
                        (above / "cgroup.subtree_control").write_text("+cpu")

    def limit(self, cores: float | None) -> None:
        """Limit the processors of the whole host; None removes the limit.

        Raises BedError where this machine cannot.
        """
        quota_us = None if cores is None else max(MIN_QUOTA_US, round(cores * PERIOD_US))
        folder = self._folder("cpu")
        old, new = folder / "cpu.cfs_quota_us", folder / "cpu.max"
        if "cpu" in mounts():
            self._write(old, "-1")
            self._write(folder / "cpu.cfs_period_us", str(PERIOD_US))
            self._write(old, str(quota_us or -1))
        elif cores is not None or new.exists():
            self._write(new, f"{quota_us or 'max'} {PERIOD_US}")

    def favour(self) -> None:
        """Gives the hosts of the bed together the processors before all else on the machine."""
        above = self._folder("cpu").parent
        if "cpu" in mounts():
            self._write(above / "cpu.shares", str(FAVOURED_SHARES))
        else:
            self._write(above / "cpu.weight", str(FAVOURED_WEIGHT))

    @property
    def times_throttled(self) -> int:
        """How often the host wanted more than its limit and had to wait."""
        folder = self._folder("cpu")
        lines = (folder / "cpu.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["nr_throttled"])

    def freeze(self, *, frozen: bool) -> None:
        """Stops every process, or lets them go on; returns when it has happened.

        Raises BedError where this machine cannot.
        """
        folder = self._folder("freezer")
        file, state, words = folder / "cgroup.freeze", folder / "cgroup.events", ("0", "1")
        if "freezer" in mounts():
            file = state = folder / "freezer.state"
            words = ("THAWED", "FROZEN")
        if not frozen and not file.exists():
            return
        self._write(file, words[frozen])
        states = (words[frozen], f"frozen {words[frozen]}")
        wait_until(lambda: set(state.read_text().splitlines()) & set(states), f"{file} to change")

    def remove(self) -> None:
        """Removes the folders; their processes must have ended, or end within a second."""
        for folder in self.folders:
            for _ in range(50):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.02)
            with suppress(OSError):
                folder.parent.rmdir()

    def _folder(self, controller: str) -> Path:
        return mounts().get(controller, mounts().get("unified", NOWHERE)) / self.name

    @staticmethod
    def _write(file: Path, text: str) -> None:
        try:
            file.write_text(text)
        except OSError as error:
            raise BedError(f"{file}: cannot write {text!r}: {error}") from error
