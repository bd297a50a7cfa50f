"""One start of a training: its steps in order, and when it began, was ready and ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from paceline.core.errors import UserError
from paceline.core.ranks import merge_ranks
from paceline.core.steps import FloatColumn, IntColumn, Steps
from paceline.files.events import RankLog
from paceline.files.run_folder import RunRecord, read_record
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from paceline.machines.slurm.record import RECORD_FILE
from paceline.runs.ending import read_ranks
from paceline.runs.outcome import evaluate


@dataclass(frozen=True)
class Attempt:
    """What one start of the training did; None for what nothing tells."""

    name: str
    index: IntColumn
    """Step numbers in order."""
    seconds: FloatColumn
    """Of each step, slowest rank; NaN where it was not timed."""
    checkpoint_s: FloatColumn
    """Part of it that waited for a checkpoint."""
    resumed_after: int = 0
    """The step whose checkpoint it went on from."""
    evaluation_s: float = 0.0
    asked_unix: float | None = None
    """When it was asked for."""
    launched_unix: float | None = None
    ready_unix: float | None = None
    """When its slowest rank was ready to train."""
    ended_unix: float | None = None
    queues: bool = False
    """Whether a queue lies between the launch and the start."""
    steps_asked: int | None = None
    status: str | None = None


def attempt_of_run(folder: Path) -> Attempt:
    """The attempt that a run folder of Paceline is; raises UserError for one that is no such."""
    record = read_record(folder)
    if record.spec is None:
        raise UserError(
            str(folder),
            "is an imported log",
            remedy=f"name the log itself: {folder / record.log}" if record.log else None,
        )
    ranks = read_ranks(folder)
    steps = merge_ranks({rank: Steps.of(log.steps) for rank, log in ranks.items()})
    if not len(steps):  # a program of somebody else, whose log alone tells
        steps = evaluate(folder).steps
    starts = [log.start for log in ranks.values() if log.start]
    first = max((start.first_step for start in starts), default=1)
    ready = max((start.time_unix for start in starts), default=None)
    return Attempt(
        name=folder.name,
        index=steps.index,
        seconds=_with_watched(steps, ranks),
        checkpoint_s=np.nan_to_num(steps["checkpoint_s"]),
        resumed_after=first - 1,
        evaluation_s=max((_evaluation_s(log) for log in ranks.values()), default=0.0),
        asked_unix=datetime.fromisoformat(record.created).timestamp(),
        launched_unix=record.launched_unix,
        ready_unix=ready,
        ended_unix=_ended_unix(record, ranks, steps, ready),
        queues=(folder / RECORD_FILE).exists(),
        steps_asked=record.spec.steps_asked,
        status=record.status,
    )


def attempts_of_log(path: Path) -> list[Attempt]:
    """The attempts in a foreign log, one after each restart; raises UserError for no training log.

    A log tells steps alone: nothing of the time before, between and after them.
    """
    parsing = parse_log(path, UserSettings())
    steps = parsing.log.steps() if parsing.log else parsing.steps
    if steps is None or not len(steps) or not steps.known("step_time_s"):
        raise UserError(
            str(path),
            parsing.document.reason or "tells no step times",
            remedy="`paceline parse` it",
        )
    begins = np.flatnonzero(np.diff(steps.index) <= 0) + 1
    edges = [0, *begins.tolist(), len(steps)]
    parts = [steps.select(slice(a, b)) for a, b in pairwise(edges)]
    asked = parsing.log.facts.get("total_steps")
    return [
        Attempt(
            name=f"{path.name}#{number}" if len(parts) > 1 else path.name,
            index=part.index,
            # A line may stand for several steps, whose mean it prints.
            seconds=part["step_time_s"] * _steps_of_lines(part),
            checkpoint_s=np.zeros(len(part)),
            resumed_after=_before_first(part),
            steps_asked=int(asked) if isinstance(asked, int | float) else None,
        )
        for number, part in enumerate(parts, 1)
    ]


def _steps_of_lines(part: Steps) -> FloatColumn:
    """How many steps each line stands for: those since the line before it."""
    if len(part) < 2:
        return np.ones(len(part))
    gaps = np.diff(part.index).astype(np.float64)
    return np.concatenate([[min(float(part.index[0]), gaps[0]) or 1.0], gaps])


def _before_first(part: Steps) -> int:
    return int(part.index[0] - _steps_of_lines(part)[0]) if len(part) else 0


def _with_watched(steps: Steps, ranks: dict[int, RankLog]) -> FloatColumn:
    """Step times with those of the steps whose memory was watched, which are in no other figure."""
    seconds = np.array(steps["step_time_s"], dtype=np.float64)
    watched = [log.tracked for log in ranks.values() if log.tracked]
    for event in watched:
        at = np.flatnonzero(steps.index == event.step)
        seconds[at] = np.fmax(seconds[at], event.step_time_s)
    return seconds


def _evaluation_s(log: RankLog) -> float:
    return sum(event.eval_time_s for event in log.evaluations)


def _ended_unix(
    record: RunRecord, ranks: dict[int, RankLog], steps: Steps, ready: float | None
) -> float | None:
    """When it ended; of a run that was killed, when its last whole step did."""
    told = [log.end.time_unix for log in ranks.values() if log.end]
    if record.ended_unix is not None or told:
        return record.ended_unix or max(told)
    if ready is None:
        return None
    evaluations = max((_evaluation_s(log) for log in ranks.values()), default=0.0)
    return ready + float(np.nansum(_with_watched(steps, ranks))) + evaluations
