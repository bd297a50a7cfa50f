"""Attempt of a training: its ordered steps, and the times of its start, readiness and end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from paceline.core.errors import UserError
from paceline.core.ranks import merge_ranks
from paceline.core.run import RunSettings
from paceline.core.steps import FloatColumn, IntColumn, Steps
from paceline.core.window import BATCH_SIZES
from paceline.engines.log_reading.log_content import LogContent
from paceline.files.events import RankLog
from paceline.files.run_folder import RUN_FILE, STEPS_FOLDER, RunRecord, read_record
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from paceline.machines.slurm.record import RECORD_FILE
from paceline.machines.slurm.script import ATTEMPTS_FOLDER
from paceline.runs.ending import read_ranks
from paceline.runs.outcome import evaluate


@dataclass(frozen=True)
class Attempt:
    """One start of a training; unknown values are None."""

    name: str
    index: IntColumn
    """Step number of each row (rows,), in order."""
    steps: FloatColumn
    """Number of steps that each row covers (rows,); a log may print every tenth step."""
    seconds: FloatColumn
    """Time of all steps of each row (rows,) in seconds, slowest rank; NaN if not timed."""
    checkpoint_s: FloatColumn
    """Part of `seconds` that waited for a checkpoint (rows,)."""
    resumed_after: int = 0
    """Step of the checkpoint that it resumed from; 0 for none."""
    evaluation_s: float = 0.0
    requested_unix: float | None = None
    """Time of the request for this attempt, in Unix seconds."""
    launched_unix: float | None = None
    ready_unix: float | None = None
    """Time when its slowest rank was ready to train, in Unix seconds."""
    ended_unix: float | None = None
    queues: bool = False
    """True if there is a queue between the launch and the start."""
    steps_requested: int | None = None
    has_one_batch: bool = True
    """True if batch size and sequence length do not change, so that equal steps take equal time."""
    status: str | None = None
    facts: RunSettings = field(default_factory=RunSettings)
    """Known settings of the training."""

    @property
    def clocked(self) -> bool:
        """True if its full wall time is known, which a log does not contain."""
        return self.requested_unix is not None and self.ended_unix is not None


def start_order(attempt: Attempt) -> tuple[bool, float]:
    """Return the sort key of an attempt: the time of its request; logs come first, unsorted."""
    return attempt.requested_unix is not None, attempt.requested_unix or 0.0


def attempts_of_run(folder: Path) -> list[Attempt]:
    """Return the attempts in a run folder: one, after those that a Slurm job restarted.

    Raises UserError for an imported log.
    """
    record = read_record(folder)
    if record.spec is None:
        raise UserError(
            str(folder),
            "is an imported log",
            remedy=f"use the log itself: {folder / record.log}" if record.log else None,
        )
    places = [path.parent for path in folder.glob(f"{ATTEMPTS_FOLDER}/*/{STEPS_FOLDER}")]
    tries = [(place.name, read_ranks(place)) for place in places]
    tries = sorted((t for t in tries if _ready_unix(t[1])), key=lambda t: _ready_unix(t[1]) or 0.0)
    attempts: list[Attempt] = []
    try:
        requested_unix = datetime.fromisoformat(record.created).timestamp()
    except ValueError:
        raise UserError(
            str(folder / RUN_FILE),
            f"created: {record.created!r} is not a date and time",
            remedy="correct it, for example 2026-01-15T08:00:00+00:00",
        ) from None
    for name, ranks in tries:
        attempt = _attempt(f"{folder.name}/{name}", ranks, record, requested_unix, None)
        # Slurm requests the next start as soon as this one has ended.
        requested_unix = attempt.ended_unix or requested_unix
        attempts.append(replace(attempt, status="failed"))
    last = _attempt(folder.name, read_ranks(folder), record, requested_unix, _ended_unix(record))
    last = replace(last, queues=(folder / RECORD_FILE).exists(), status=record.status)
    # A program without event lines may have only a log.
    return [
        *attempts,
        *([last] if len(last.index) else _attempts_in_log(last, evaluate(folder).steps)),
    ]


def _ended_unix(record: RunRecord) -> float | None:
    """Return when the run ended, in Unix seconds as the clock was at its launch.

    The wall clock can be set during a run, so the duration is that of the monotonic clock.
    """
    if None in (record.launched_unix, record.launched_monotonic_s, record.ended_monotonic_s):
        return record.ended_unix
    duration_s = (record.ended_monotonic_s or 0.0) - (record.launched_monotonic_s or 0.0)
    return (record.launched_unix or 0.0) + duration_s


def _attempts_in_log(run: Attempt, steps: Steps) -> list[Attempt]:
    """Return the attempts in the log of a run without event lines, one per start.

    The run has only one wall time for all of them. All time outside steps counts for the last one.
    """
    attempts: list[Attempt] = []
    parts = _parts(steps)
    start_unix = run.requested_unix
    for number, part in enumerate(parts[:-1], 1):
        attempt = replace(_with_lines(run, part), name=f"{run.name}#{number}", status=None)
        end_unix = None if start_unix is None else start_unix + float(np.nansum(attempt.seconds))
        attempts.append(replace(attempt, requested_unix=start_unix, ended_unix=end_unix))
        start_unix = end_unix
    name = f"{run.name}#{len(parts)}" if attempts else run.name
    return [*attempts, replace(_with_lines(run, parts[-1]), name=name, requested_unix=start_unix)]


def _attempt(
    name: str,
    ranks: dict[int, RankLog],
    record: RunRecord,
    requested_unix: float,
    ended_unix: float | None,
) -> Attempt:
    """Return the attempt from its ranks' logs; without a recorded end, it ends at its last step."""
    steps = merge_ranks({rank: Steps.of(log.steps) for rank, log in ranks.items()})
    first = max((log.start.first_step for log in ranks.values() if log.start), default=1)
    return Attempt(
        name=name,
        index=steps.index,
        steps=np.ones(len(steps)),
        seconds=_with_tracked_steps(steps, ranks),
        checkpoint_s=np.nan_to_num(steps["checkpoint_s"]),
        resumed_after=first - 1,
        evaluation_s=max((_evaluation_s(log) for log in ranks.values()), default=0.0),
        requested_unix=requested_unix,
        launched_unix=record.launched_unix,
        ready_unix=_ready_unix(ranks),
        ended_unix=ended_unix or _last_sign_unix(ranks, steps),
        queues=True,
        has_one_batch=_has_one_batch(steps),
        steps_requested=record.spec.steps_requested if record.spec else None,
        facts=record.settings,
    )


def _ready_unix(ranks: dict[int, RankLog]) -> float | None:
    """Return when the slowest rank was ready to train, in Unix seconds."""
    return max((log.start.time_unix for log in ranks.values() if log.start), default=None)


def attempts_of_log(path: Path) -> list[Attempt]:
    """Return the attempts in the log of another program, one per start.

    A log contains only steps and evaluations, not the time before and after them. Raises UserError
    for a file that is not a training log, and for one with several finished trainings.
    """
    parsing = parse_log(path, UserSettings())
    steps = parsing.log.steps() if parsing.log else parsing.steps
    if steps is None or not len(steps) or not steps.known("step_time_s"):
        raise UserError(
            str(path),
            parsing.document.reason or "has no step times",
            remedy="inspect it with `paceline parse`",
        )
    _check_one_training(path, parsing.log, steps)
    total_steps = parsing.log.facts.get("total_steps")
    empty = Attempt(
        name=path.name,
        index=np.zeros(0, np.int64),
        steps=np.zeros(0),
        seconds=np.zeros(0),
        checkpoint_s=np.zeros(0),
        steps_requested=int(total_steps) if isinstance(total_steps, int | float) else None,
        facts=parsing.document.settings,
    )
    *earlier, last = _attempts_in_log(empty, steps)
    return [*earlier, replace(last, evaluation_s=parsing.log.figures.get("evaluation_s", 0.0))]


def _check_one_training(path: Path, log: LogContent, steps: Steps) -> None:
    """Raise UserError if the steps start over after a training that was complete.

    A restart from a late checkpoint is an attempt of it: its last save may have failed.
    """
    rows = 0
    for part in _parts(steps)[:-1]:
        rows += len(part)
        total = log.facts_of(rows - 1).get("total_steps") or log.facts.get("total_steps")
        first, last = int(part.index[0]), int(part.index[-1])
        is_new = steps.index[rows] <= steps.index[:rows].min()
        if is_new and isinstance(total, int | float) and last >= total - (first == 0):
            raise UserError(
                str(path),
                f"starts over at step {int(steps.index[rows]):,} after a training that was "
                f"complete ({last:,} of {int(total):,} steps): it holds several trainings, not "
                "attempts of one",
                remedy="split the log where a training ends",
            )


def _parts(steps: Steps) -> list[Steps]:
    """Split the lines by attempt; a step number that does not increase starts a new one."""
    begins = np.flatnonzero(np.diff(steps.index) <= 0) + 1
    return [steps.select(slice(a, b)) for a, b in pairwise([0, *begins.tolist(), len(steps)])]


def _with_lines(attempt: Attempt, lines: Steps) -> Attempt:
    """Return an attempt with the steps of a log's lines."""
    steps = _steps_of_lines(lines)
    return replace(
        attempt,
        index=lines.index,
        steps=steps,
        # A line may cover several steps and print their mean.
        seconds=lines["step_time_s"] * steps,
        checkpoint_s=np.zeros(len(lines)),
        has_one_batch=_has_one_batch(lines),
        resumed_after=int(lines.index[0] - steps[0]) if len(lines) else attempt.resumed_after,
    )


def _has_one_batch(steps: Steps) -> bool:
    return all(len(np.unique(steps[name])) <= 1 for name in BATCH_SIZES)


def _steps_of_lines(part: Steps) -> FloatColumn:
    """Return the number of steps of each line (lines,), counted from the previous line."""
    if len(part) < 2:
        return np.ones(len(part))
    gaps = np.diff(part.index).astype(np.float64)
    # The first line has no previous line: it covers as many steps as the second one, but not more
    # than its own step number.
    return np.concatenate([[min(float(part.index[0]), gaps[0]) or 1.0], gaps])


def _with_tracked_steps(steps: Steps, ranks: dict[int, RankLog]) -> FloatColumn:
    """Return the step times, including steps with memory tracking, which other figures exclude."""
    seconds = np.array(steps["step_time_s"], dtype=np.float64)
    tracked_steps = [log.tracked_step for log in ranks.values() if log.tracked_step]
    for event in tracked_steps:
        at = np.flatnonzero(steps.index == event.step)
        seconds[at] = np.fmax(seconds[at], event.step_time_s)
    return seconds


def _evaluation_s(log: RankLog) -> float:
    return sum(event.eval_time_s for event in log.evaluations)


def _last_sign_unix(ranks: dict[int, RankLog], steps: Steps) -> float | None:
    """Return when the ranks reported their end, or when their last step ended."""
    ends = [log.end.time_unix for log in ranks.values() if log.end]
    ready = _ready_unix(ranks)
    if ends or ready is None:
        return max(ends, default=None)
    evaluations = max((_evaluation_s(log) for log in ranks.values()), default=0.0)
    return ready + float(np.nansum(_with_tracked_steps(steps, ranks))) + evaluations
