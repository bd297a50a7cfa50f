"""What becomes of work when the hosts of a part are lost: another part takes it over."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import Cluster
from paceline.core.result import Result
from paceline.files.run_folder import read_record
from paceline.runs.places.part import Part
from paceline.runs.places.work import side_by_side

BROKEN_LAUNCH = ("failed", "incomplete")
"""Statuses with which a host at fault is taken out; lack of memory is the layout's own matter."""
NONE_WHOLE = "no part of the hosts is whole any more"


@dataclass
class Losses:
    """The parts that are whole, and the work that was taken from others.

    A part of which a host is lost gets nothing more, unless it is the last: then the same work is
    tried there once more, because a connection that broke once may be back.
    """

    parts: Sequence[Part]
    lost: dict[Part, str] = field(default_factory=dict[Part, str])
    """With how the run ended."""
    _moved: set[Hashable] = field(default_factory=set[Hashable])
    _lock: Lock = field(default_factory=Lock)

    @property
    def whole(self) -> list[Part]:
        """Parts that have lost no host."""
        return [part for part in self.parts if part not in self.lost]

    @property
    def halted(self) -> str | None:
        """Why nothing more can run; None while there is a part."""
        if self.whole:
            return None
        return f"{NONE_WHOLE}: {[*self.lost.values()][-1]}"

    def note(self, part: Part, work: Hashable, why: str) -> bool:
        """A host of the part was lost under this work; whether it is tried once more."""
        with self._lock:
            again = work not in self._moved
            self._moved.add(work)
            if not (again and self.whole == [part]):
                self.lost[part] = why
            return again

    def share(
        self, left: Callable[[Sequence[Part]], bool], stop: Event, work: Callable[[Part], None]
    ) -> bool:
        """Call `work` on all whole parts side by side while `left` says that something is left for them.

        Whether the user has broken it off. It ends also when no part is whole.
        """
        while not stop.is_set() and (whole := self.whole) and left(whole):
            if len(whole) == 1:
                work(whole[0])
            elif side_by_side(whole, stop, work):
                return True
        return False


def is_lost(part: Part, cluster: Cluster, ended: Result | SystemFaultError, root: Path) -> bool:
    """Whether a run in `root` ended in such a way because of a host of its part.

    Of a run whose nodes Slurm chooses no host is lost: Slurm gives the next one others.
    """
    faulty = ended.hosts if isinstance(ended, SystemFaultError) else ()
    hosts = part.hosts or cluster.hosts
    if not hosts and not (cluster.launcher == "slurm" and cluster.slurm.allocation):
        return False
    if isinstance(ended, Result) and ended.status in BROKEN_LAUNCH:
        faulty = read_record(root / ended.run).faulty_hosts
    return bool({*faulty} & {*hosts}) if hosts else bool(faulty)


def why_ended(ended: Result | SystemFaultError) -> str:
    """How a run ended, in a sentence."""
    return str(ended) if isinstance(ended, SystemFaultError) else ended.reason or ended.status
