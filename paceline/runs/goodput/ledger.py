"""Goodput ledger: every second of a training and its attempts is in one account."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from paceline.core.errors import UserError
from paceline.core.units import SECONDS_PER_DAY, seconds
from paceline.core.value import NonNegativeInt, Value
from paceline.runs.goodput.attempt import Attempt, start_order
from paceline.runs.goodput.training import restart_notes

Account = Literal[
    "productive",
    "slow_steps",
    "checkpoint",
    "lost_steps",
    "compile",
    "initialisation",
    "queue",
    "evaluation",
    "stopped",
    "other",
]
ACCOUNTS: tuple[Account, ...] = get_args(Account)
BoolColumn = npt.NDArray[np.bool_]


class AttemptEntry(Value):
    """Attempt of the training with its seconds by account."""

    name: str
    status: str | None
    first_step: NonNegativeInt | None
    last_step: NonNegativeInt | None
    steps_kept: NonNegativeInt
    """Number of steps that no later attempt repeated."""
    steps_repeated: NonNegativeInt
    """Number of steps that a later attempt repeated."""
    seconds: dict[Account, float]


class GoodputLedger(Value):
    """Breakdown of a training's wall time."""

    schema_version: Literal[1] = 1
    attempts: tuple[AttemptEntry, ...]
    wall_s: float
    """Time from the first request to the last end; for logs, the total time of their steps."""
    seconds: dict[Account, float]
    """Seconds by account, which add up to `wall_s`."""
    goodput: float
    """Productive time divided by wall time, 0-1."""
    usual_step_s: float
    """Expected step time: the median of the kept steps of all attempts."""
    n: NonNegativeInt
    """Number of step times in that median; for logs, lines that each print a mean."""
    steps_kept: NonNegativeInt
    steps_requested: NonNegativeInt | None
    days_left: float | None
    """Remaining days at the rate so far, with losses; None if the number of steps is unknown."""
    days_left_at_best: float | None
    """Remaining days if every step took the usual time and nothing else took time."""
    whole: bool
    """True if the time outside steps is known, which a log alone does not contain."""
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the training, from its first attempt."""
        more = len(self.attempts) - 1
        first = self.attempts[0].name
        return f"{first} and {more} more" if more else first

    @property
    def wall_text(self) -> str:
        """Wall time as text."""
        return f"{seconds(self.wall_s)} of wall time"


def ledger_of(attempts: Sequence[Attempt], steps_requested: int | None = None) -> GoodputLedger:
    """Return the ledger of the attempts of one training, in chronological order.

    The time of a step counts as productive up to the usual step time. The excess counts as slow,
    or as compilation for the first step of an attempt. Steps that a later attempt repeated are
    fully lost. Raises UserError if no step was timed.
    """
    entries = sorted(attempts, key=start_order)
    masks = [_kept_mask(entry, entries[at + 1 :]) for at, entry in enumerate(entries)]
    # The first kept step of each attempt may include compilation, so the median excludes it.
    times = [
        ((entry.seconds - entry.checkpoint_s) / entry.steps)[keep][1:]
        for entry, keep in zip(entries, masks, strict=True)
    ]
    pool = np.concatenate(times) if times else np.array([])
    pool = pool[np.isfinite(pool)]
    if not len(pool):
        raise UserError(
            "goodput",
            "no step has a measured time",
            remedy="find other runs with `paceline runs list`",
        )
    usual = float(np.median(pool))
    rows = [_entry(entry, keep, usual) for entry, keep in zip(entries, masks, strict=True)]
    seconds: dict[Account, float] = {
        account: sum(row.seconds.get(account, 0.0) for row in rows) for account in ACCOUNTS
    }
    seconds["stopped"] = sum(_between(a, b) for a, b in pairwise(entries))
    wall = sum(seconds.values())
    steps_kept = sum(row.steps_kept for row in rows)
    total_steps = steps_requested or max(
        (e.steps_requested for e in entries if e.steps_requested), default=None
    )
    last_step = max(int(e.index[k][-1]) for e, k in zip(entries, masks, strict=True) if k.any())
    num_left = max(0, total_steps - last_step) if total_steps else None
    return GoodputLedger(
        attempts=tuple(rows),
        wall_s=wall,
        seconds=seconds,
        goodput=seconds["productive"] / wall,
        usual_step_s=usual,
        n=len(pool),
        steps_kept=steps_kept,
        steps_requested=total_steps,
        days_left=None if num_left is None else num_left * wall / steps_kept / SECONDS_PER_DAY,
        days_left_at_best=None if num_left is None else num_left * usual / SECONDS_PER_DAY,
        whole=all(entry.clocked for entry in entries),
        notes=_notes(entries),
    )


def _kept_mask(entry: Attempt, later: Sequence[Attempt]) -> BoolColumn:
    """Return the mask (rows,) of steps that no later attempt repeated."""
    began = min((other.resumed_after for other in later if len(other.index)), default=None)
    return np.ones(len(entry.index), np.bool_) if began is None else entry.index <= began


def _entry(entry: Attempt, keep: BoolColumn, usual: float) -> AttemptEntry:
    seconds, checkpoint_s = np.nan_to_num(entry.seconds), entry.checkpoint_s
    work = np.maximum(seconds - checkpoint_s, 0.0)
    first = np.zeros(len(work), np.bool_)
    first[:1] = True
    beyond = np.maximum(work - usual * entry.steps, 0.0)
    accounts: dict[Account, float] = {
        "productive": float(np.minimum(work, usual * entry.steps)[keep].sum()),
        "slow_steps": float(beyond[keep & ~first].sum()),
        "compile": float(beyond[keep & first].sum()),
        "checkpoint": float(checkpoint_s[keep].sum()),
        "lost_steps": float(seconds[~keep].sum()),
        "evaluation": entry.evaluation_s,
        **_outside(entry, float(seconds.sum())),
    }
    count = len(entry.index)
    return AttemptEntry(
        name=entry.name,
        status=entry.status,
        first_step=int(entry.index[0]) if count else None,
        last_step=int(entry.index[-1]) if count else None,
        steps_kept=int(entry.steps[keep].sum()),
        steps_repeated=int(entry.steps[~keep].sum()),
        seconds=accounts,
    )


def _outside(entry: Attempt, in_steps: float) -> dict[Account, float]:
    """Return the seconds of an attempt outside its steps; {} if they are unknown."""
    start_unix, end = entry.requested_unix, entry.ended_unix
    if start_unix is None or end is None:
        return {}
    if entry.ready_unix is None:
        return {"initialisation": max(0.0, end - start_unix - in_steps - entry.evaluation_s)}
    before = max(start_unix, entry.launched_unix or start_unix)
    start = max(0.0, entry.ready_unix - start_unix)
    # A batch system does not report when it released the job, so queue and start are one figure.
    queue = max(0.0, entry.ready_unix - before) if entry.queues else 0.0
    other = end - entry.ready_unix - in_steps - entry.evaluation_s
    return {"queue": queue, "initialisation": start - queue, "other": max(0.0, other)}


def _between(earlier: Attempt, later: Attempt) -> float:
    if earlier.ended_unix is None or later.requested_unix is None:
        return 0.0
    return max(0.0, later.requested_unix - earlier.ended_unix)


def _notes(entries: Sequence[Attempt]) -> tuple[str, ...]:
    notes: list[str] = []
    if any(entry.requested_unix is None for entry in entries):
        notes.append(
            "logs contain only steps: initialisation, queue and stops are not counted, so the "
            "goodput is an upper bound"
        )
    if any(entry.clocked and entry.ready_unix is None for entry in entries):
        notes.append(
            "without event lines it is unknown when a program was ready: all time outside its "
            "steps counts as `initialisation`"
        )
    if any(entry.queues for entry in entries):
        notes.append("for queued jobs, `queue` includes the start of the job")
    notes += restart_notes(entries)
    settings = [e.facts for e in entries if e.facts.num_devices and e.facts.device]
    places = list(dict.fromkeys(f"{each.num_devices:,} x {each.device}" for each in settings))
    if len(places) > 1:
        where = ", then ".join(places)
        notes.append(f"the attempts ran on {where}, but share one usual step time")
    return tuple(notes)
