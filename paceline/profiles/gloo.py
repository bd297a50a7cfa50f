"""Collectives of gloo in a trace: its threads do not say for which group they work.

The native trainer marks every call with the axis of its group. gloo's threads take calls in order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SENT = "gloo:"
"""Begin of the names of what its threads do."""
ISSUED = "paceline:communication:"
"""Begin of the marks, behind which axis and method stand."""
UNKNOWN = "unknown"
_FAMILY = re.compile(r"reduce|gather|broadcast|scatter|to_?all|send|recv|barrier")


class TracedCall(NamedTuple):
    """A named stretch of time in seconds."""

    begin_s: float
    end_s: float
    name: str


def with_axes(
    sent: Sequence[TracedCall], issued: Sequence[TracedCall]
) -> Iterator[tuple[TracedCall, str]]:
    """What was sent with its axis, `unknown` where no call is left for it.

    It belongs to the call that it lies in; else to the next one of its family that has none.
    """
    calls: dict[str, list[TracedCall]] = defaultdict(list)
    for call in sorted(issued):
        calls[_family(call.name)].append(call)
    queued: dict[str, list[TracedCall]] = defaultdict(list)
    for work in sorted(sent):
        queued[_family(work.name)].append(work)
    for family, works in queued.items():
        waiting = _Calls(calls[family])
        inside = [waiting.around(work) for work in works]
        for work, call in zip(works, inside, strict=True):
            call = call or waiting.next(work)
            yield work, call.name.removeprefix(ISSUED).partition(":")[0] if call else UNKNOWN


class _Calls:
    """Calls of one family, each of which is taken once."""

    def __init__(self, calls: list[TracedCall]) -> None:
        self.calls, self.taken = calls, [False] * len(calls)
        self.first = 0

    def around(self, work: TracedCall) -> TracedCall | None:
        """The call in which a work lies, which is then taken; works are asked for in order."""
        while self.first < len(self.calls) and self.calls[self.first].end_s < work.begin_s:
            self.first += 1
        at = self.first
        if at == len(self.calls) or self.taken[at]:
            return None
        call = self.calls[at]
        if call.begin_s <= work.begin_s and work.end_s <= call.end_s:
            self.taken[at] = True
            return call
        return None

    def next(self, work: TracedCall) -> TracedCall | None:
        """The first call that is not taken and was issued before a work began."""
        if all(self.taken):
            return None
        at = self.taken.index(False)
        if self.calls[at].begin_s > work.begin_s:
            return None
        self.taken[at] = True
        return self.calls[at]


def _family(name: str) -> str:
    match = _FAMILY.search(name.rpartition(":")[2])
    return match[0] if match else ""
