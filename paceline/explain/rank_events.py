"""The event lines of a run's ranks as far as an explanation looks at them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.files.documents import read_lines
from paceline.files.events import EndEvent, StartEvent, StepEvent, read_events
from paceline.files.run_folder import STEPS_FOLDER

MOST_STEPS = 1000
"""Of a rank, the last ones: a longer run has no other usual step."""
_FILE = re.compile(r"rank-(\d+)\.jsonl")


@dataclass(frozen=True)
class RankEvents:
    """What one rank told."""

    start: StartEvent | None
    steps: tuple[StepEvent, ...]
    end: EndEvent | None = None


def rank_events(folder: Path, first: int, last: int) -> dict[int, RankEvents]:
    """The steps `first` to `last` of every rank, at most MOST_STEPS, without watched ones."""
    ranks: dict[int, RankEvents] = {}
    for path in sorted((folder / STEPS_FOLDER).glob("rank-*.jsonl")):
        named = _FILE.fullmatch(path.name)
        if named is None:
            continue
        try:
            ranks[int(named[1])] = _read(read_lines(path), first, last)
        except OSError:  # no file, or none that can be read: this rank tells nothing
            continue
    return ranks


def _read(lines: Iterable[str], first: int, last: int) -> RankEvents:
    start: StartEvent | None = None
    end: EndEvent | None = None
    steps: deque[StepEvent] = deque(maxlen=MOST_STEPS)
    for event in read_events(lines):
        if isinstance(event, StartEvent):
            start = event
        elif isinstance(event, EndEvent):
            end = event
        elif isinstance(event, StepEvent) and first <= event.step <= last and not event.tracked:
            steps.append(event)
    return RankEvents(start, tuple(steps), end)
