"""Goodput ledger: every second of a training and its attempts is in one account."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from paceline.core.errors import UserError
from paceline.core.run import RunSettings
from paceline.core.steps import FloatColumn
from paceline.core.units import SECONDS_PER_DAY, all_steps_done, pluralize, seconds
from paceline.core.value import NonNegativeInt, Value
from paceline.runs.goodput.attempt import Attempt, start_order

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
MIN_SLOWDOWN = 0.05
"""Minimum difference of a slower level of step times that is a loss."""
MIN_FAST_SHARE = 0.2
"""Minimum share of the steps on a faster level; a rarer one is not usual."""
MAX_FAST_SHARE = 0.75
"""Share of the steps on the faster level above which it has the median anyway."""
CLIPPED = 0.05
"""Share of the steps at either end whose times are clipped, so that spikes form none."""
MIN_EXPLAINED = 0.8
"""Minimum share of the variation that two levels explain; of a ramp, two levels explain 75%."""
MIN_LEVEL_STEPS = 5
"""Minimum mean number of consecutive steps on a level."""
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
    """Expected step time: the median of the kept steps of all attempts, or of their faster level if
    at least 20% of the steps are on it."""
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
    usual, note = float(np.median(pool)), None
    if all(entry.has_one_batch for entry in entries) and len(_places(entries)) <= 1:
        usual, note = _unthrottled_step(pool)
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
        notes=(*_notes(entries), *([note] if note else [])),
    )


def _unthrottled_step(times: FloatColumn) -> tuple[float, str | None]:
    """Return the usual step time in seconds, and a note if the steps have a slower level.

    A median would count a training that is throttled for most of its time as productive. The steps
    are split in two so that the sum of squares within both is smallest (Otsu). They have two levels
    if the split explains most of their variation and both levels last for many steps: steps in any
    order, such as batches of two lengths, have one usual time.
    """
    median = float(np.median(times))
    logs = np.log(np.maximum(times, np.finfo(float).tiny))
    logs = np.clip(logs, *np.quantile(logs, (CLIPPED, 1 - CLIPPED)))
    order = np.sort(logs)
    n, low = len(order), np.arange(1, len(order))
    sums = np.cumsum(order)
    between = (sums[:-1] - low * sums[-1] / n) ** 2 * n / (low * (n - low)) if n > 1 else sums[:0]
    total = float(((order - order.mean()) ** 2).sum())
    if not len(between) or not total or between.max() < MIN_EXPLAINED * total:
        return median, None
    is_fast = logs <= order[int(between.argmax())]
    num_levels = 1 + int((np.diff(is_fast.astype(np.int8)) != 0).sum())
    slowdown = float(np.median(times[~is_fast]) / np.median(times[is_fast])) - 1
    if (
        slowdown < MIN_SLOWDOWN
        or not MIN_FAST_SHARE <= is_fast.mean() <= MAX_FAST_SHARE
        or n < MIN_LEVEL_STEPS * num_levels
    ):
        return median, None
    return float(np.median(times[is_fast])), (
        f"{(~is_fast).mean():.0%} of the step times are {slowdown:.0%} longer than the others; the "
        "usual step is that of the faster level"
    )


def _places(entries: Sequence[Attempt]) -> list[str]:
    """Return the different numbers and kinds of devices of the attempts, as text."""
    settings = [e.facts for e in entries if e.facts.num_devices and e.facts.device]
    return list(dict.fromkeys(f"{each.num_devices:,} x {each.device}" for each in settings))


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
            "logs contain only steps and evaluations: initialisation, queue and stops are not "
            "counted, so the goodput is an upper bound"
        )
    if any(entry.clocked and entry.ready_unix is None for entry in entries):
        notes.append(
            "without event lines it is unknown when a program was ready: all time outside its "
            "steps counts as `initialisation`"
        )
    if any(entry.queues for entry in entries):
        notes.append("for queued jobs, `queue` includes the start of the job")
    notes += restart_notes(entries)
    places = _places(entries)
    if len(places) > 1:
        where = ", then ".join(places)
        notes.append(f"the attempts ran on {where}, but share one usual step time")
    return tuple(notes)


TRAINING_SETTINGS = ("model", "lora", "seq_len")
"""Settings that are equal in all attempts of a training."""
START_SETTINGS = ("global_batch", "device", "num_devices")
"""Settings that may change when an attempt resumes from a checkpoint on other machines."""
IDENTIFYING_SETTINGS = ("model", "seq_len", "global_batch")
"""Settings that identify a training restarted on other devices, if all are known and equal."""
LAYOUT_FIELDS = frozenset({"vocab_multiple"})
"""Fields of a shape that depend on tp: the multiple to which the vocabulary is padded."""
LAYOUT_FIELDS_IN_LOGS = LAYOUT_FIELDS | {"vocab_size"}
"""Those fields if one of the two is a log, which may report only the padded vocabulary."""
REMEDY = "give only attempts of one training run"
IN_ORDER = "give logs in the order in which they were written"


def one_training(places: Sequence[Sequence[Attempt]]) -> list[Attempt]:
    """Return the attempts of all runs and logs, each of which may hold several.

    Raises UserError if two of them are not attempts of one training. That is another model or
    sequence length; another recipe, batch or device without a checkpoint to resume from; or a
    start at step 1 after a finished training.
    """
    by_start = sorted((place for place in places if place), key=lambda each: start_order(each[0]))
    for earlier, later in combinations(by_start, 2):
        _check(earlier, later)
    return [attempt for place in by_start for attempt in place]


def restart_notes(attempts: Sequence[Attempt]) -> list[str]:
    """Return notes on attempts that restarted at step 1 on another number of devices."""
    notes: list[str] = []
    for earlier, later in pairwise([each for each in attempts if len(each.index)]):
        first, second = earlier.facts.num_devices, later.facts.num_devices
        if later.resumed_after or not first or not second or first == second:
            continue
        note = (
            f"{later.name} restarted at step 1 on {pluralize(second, 'device')} instead of "
            f"{first:,}; earlier steps count as lost"
        )
        notes.append(
            f"{note}; if that is wrong, {IN_ORDER}" if later.requested_unix is None else note
        )
    return notes


def _check(before: Sequence[Attempt], after: Sequence[Attempt]) -> None:
    """Raise UserError if the attempts of two runs or logs are not of one training."""
    # An attempt that failed before its first step does not show where it resumed from.
    with_steps = [each for each in before if len(each.index)]
    later = next((each for each in after if len(each.index)), None)
    begins = later is not None and not later.resumed_after
    names = ("recipe", *TRAINING_SETTINGS) if begins else TRAINING_SETTINGS
    if other := _difference(before[-1].facts, after[0].facts, names):
        raise UserError(
            f"goodput {after[0].name}",
            f"belongs to another training run than {before[-1].name}: {other}",
            remedy=REMEDY,
        )
    if with_steps and later and begins:
        _check_start(with_steps[-1], later)


def _check_start(earlier: Attempt, later: Attempt) -> None:
    """Raise UserError if an attempt from step 1 is not a restart of the earlier training."""
    where = f"goodput {later.name}"
    remedy = f"{REMEDY}, and {IN_ORDER}" if later.requested_unix is None else REMEDY
    names = _start_settings(earlier.facts, later.facts)
    if other := _difference(earlier.facts, later.facts, names):
        raise UserError(
            where,
            f"does not resume from a checkpoint of {earlier.name} and has another {other}",
            remedy=remedy,
        )
    total_steps = earlier.steps_requested
    if total_steps and earlier.index[-1] >= total_steps:
        raise UserError(
            where,
            f"starts at step 1, but {earlier.name} was complete: {all_steps_done(total_steps)}",
            remedy=remedy,
        )


def _start_settings(earlier: RunSettings, later: RunSettings) -> Sequence[str]:
    """Return the settings that must be equal without a checkpoint.

    If all settings that identify a training are known, another number of devices only adds a note.
    """
    is_identified = all(
        getattr(each, name) is not None
        for each in (earlier, later)
        for name in IDENTIFYING_SETTINGS
    )
    return START_SETTINGS[:-1] if is_identified else START_SETTINGS


def _difference(earlier: RunSettings, later: RunSettings, names: Sequence[str]) -> str | None:
    """Return the first of `names` that is known and different in both, as text; None if none is.

    The recipe's name is ignored for a program without a described model, because its name may be
    spelled differently later.
    """
    is_imported = "imported" in (earlier.origin, later.origin)
    for name in names:
        first, second = getattr(earlier, name), getattr(later, name)
        is_comparable = name != "recipe" or (earlier.model and later.model)
        if not is_comparable or first is None or second is None:
            continue
        if isinstance(first, Value) and isinstance(second, Value):
            leave = LAYOUT_FIELDS_IN_LOGS if is_imported else LAYOUT_FIELDS
            if field := _field_difference(name, first.model_dump(), second.model_dump(), leave):
                return field
        elif first != second:
            words = name.replace("num_", "number of ").replace("global_", "global ")
            return f"{words} {second} instead of {first}"
    return None


def _field_difference(
    path: str, first: dict[str, object], second: dict[str, object], leave: frozenset[str]
) -> str | None:
    """Return the first different field of two values, as `model.num_layers 8 instead of 4`."""
    for name in [key for key in first if key not in leave]:
        old, new = first[name], second.get(name)
        if old != new:
            plain = all(isinstance(each, int | float | str | None) for each in (old, new))
            change = f" {_setting_text(new)} instead of {_setting_text(old)}" if plain else ""
            return f"{path}.{name}{change}"
    return None


def _setting_text(value: object) -> str:
    """Return a setting as the user wrote it; `unset` for None."""
    return "unset" if value is None else str(value)
