"""The recorded step events of a run's ranks."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.files.documents import read_lines
from paceline.files.events import EndEvent, StartEvent, StepEvent, read_events
from paceline.files.run_folder import STEPS_FOLDER

MAX_STEPS = 1000
"""Maximum number of steps per rank, the last ones; more do not change the mean step."""
_FILE = re.compile(r"rank-(\d+)\.jsonl")


@dataclass(frozen=True)
class RankEvents:
    """The events of one rank."""

    start: StartEvent | None
    steps: tuple[StepEvent, ...]
    end: EndEvent | None = None


def rank_events(folder: Path, first: int, last: int) -> dict[int, RankEvents]:
    """Return the steps `first` to `last` of every rank, up to MAX_STEPS, without tracked ones."""
    ranks: dict[int, RankEvents] = {}
    for path in sorted((folder / STEPS_FOLDER).glob("rank-*.jsonl")):
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue
        try:
            ranks[int(match[1])] = _read(read_lines(path), first, last)
        except OSError:  # A rank without a readable file is left out.
            continue
    return ranks


def _read(lines: Iterable[str], first: int, last: int) -> RankEvents:
    start: StartEvent | None = None
    end: EndEvent | None = None
    steps: deque[StepEvent] = deque(maxlen=MAX_STEPS)
    for event in read_events(lines):
        if isinstance(event, StartEvent):
            start = event
        elif isinstance(event, EndEvent):
            end = event
        elif isinstance(event, StepEvent) and first <= event.step <= last and not event.tracked:
            steps.append(event)
    return RankEvents(start, tuple(steps), end)
