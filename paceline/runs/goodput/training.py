"""Check that runs and logs given together are attempts of one training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from paceline.core.errors import UserError
from paceline.core.run import RunSettings
from paceline.core.units import all_steps_done, pluralize
from paceline.core.value import Value
from paceline.runs.goodput.attempt import Attempt, begun_order

OF_A_TRAINING = ("model", "lora", "seq_len")
"""Settings that are equal in all attempts of a training."""
OF_A_START = ("global_batch", "device", "num_devices")
"""Settings that may change when an attempt resumes from a checkpoint on other machines."""
TELLING = ("model", "seq_len", "global_batch")
"""Settings that identify a training restarted on other devices, if all are known and equal."""
OF_THE_LAYOUT = frozenset({"vocab_multiple"})
"""Fields of a shape that depend on tp: the multiple to which the vocabulary is padded."""
OF_THE_LAYOUT_IN_LOGS = OF_THE_LAYOUT | {"vocab_size"}
"""Those fields if one of the two is a log, which may report only the padded vocabulary."""
REMEDY = "name the attempts of one training alone"
IN_ORDER = "name logs in the order in which they were written"


def one_training(places: Sequence[Sequence[Attempt]]) -> list[Attempt]:
    """Return the attempts of all runs and logs, each of which may hold several.

    Raises UserError if two of them are not attempts of one training. That is another model or
    sequence length; another recipe, batch or device without a checkpoint to resume from; or a
    start at step 1 after a finished training.
    """
    ordered = sorted((place for place in places if place), key=lambda each: begun_order(each[0]))
    for earlier, later in combinations(ordered, 2):
        _check(earlier, later)
    return [attempt for place in ordered for attempt in place]


def begun_again(attempts: Sequence[Attempt]) -> list[str]:
    """Return notes on attempts that restarted at step 1 on another number of devices."""
    notes: list[str] = []
    for earlier, later in pairwise([each for each in attempts if len(each.index)]):
        first, second = earlier.facts.num_devices, later.facts.num_devices
        if later.resumed_after or not first or not second or first == second:
            continue
        note = (
            f"{later.name} was begun again on {pluralize(second, 'device')} instead of {first:,}; "
            "the steps before count as lost"
        )
        notes.append(
            f"{note}; where that is not so, {IN_ORDER}" if later.asked_unix is None else note
        )
    return notes


def _check(before: Sequence[Attempt], after: Sequence[Attempt]) -> None:
    """Raise UserError if the attempts of two runs or logs are not of one training."""
    # An attempt that failed before its first step does not show where it resumed from.
    trained = [each for each in before if len(each.index)]
    later = next((each for each in after if len(each.index)), None)
    begins = later is not None and not later.resumed_after
    names = ("recipe", *OF_A_TRAINING) if begins else OF_A_TRAINING
    if other := _other(before[-1].facts, after[0].facts, names):
        raise UserError(
            f"goodput {after[0].name}",
            f"is of another training than {before[-1].name}: {other}",
            remedy=REMEDY,
        )
    if trained and later and begins:
        _check_start(trained[-1], later)


def _check_start(earlier: Attempt, later: Attempt) -> None:
    """Raise UserError if an attempt from step 1 is not a restart of the earlier training."""
    where = f"goodput {later.name}"
    remedy = f"{REMEDY}, and {IN_ORDER}" if later.asked_unix is None else REMEDY
    names = _of_a_start(earlier.facts, later.facts)
    if other := _other(earlier.facts, later.facts, names):
        raise UserError(
            where,
            f"goes on from no checkpoint of {earlier.name}, which had another {other}",
            remedy=remedy,
        )
    asked = earlier.steps_requested
    if asked and earlier.index[-1] >= asked:
        raise UserError(
            where,
            f"begins at step 1 once more, and {earlier.name} was finished: {all_steps_done(asked)}",
            remedy=remedy,
        )


def _of_a_start(earlier: RunSettings, later: RunSettings) -> Sequence[str]:
    """Return the settings that must be equal without a checkpoint.

    If all settings that identify a training are known, another number of devices only adds a note.
    """
    known = all(getattr(each, name) is not None for each in (earlier, later) for name in TELLING)
    return OF_A_START[:-1] if known else OF_A_START


def _other(earlier: RunSettings, later: RunSettings, names: Sequence[str]) -> str | None:
    """Return the first of `names` that is known and different in both, as text; None if none is.

    The recipe's name is ignored for a program without a described model, because its name may be
    spelled differently later.
    """
    imported = "imported" in (earlier.origin, later.origin)
    for name in names:
        first, second = getattr(earlier, name), getattr(later, name)
        described = name != "recipe" or (earlier.model and later.model)
        if not described or first is None or second is None:
            continue
        if isinstance(first, Value) and isinstance(second, Value):
            leave = OF_THE_LAYOUT_IN_LOGS if imported else OF_THE_LAYOUT
            if field := _other_field(name, first.model_dump(), second.model_dump(), leave):
                return field
        elif first != second:
            words = name.replace("num_", "number of ").replace("global_", "global ")
            return f"{words} {second} instead of {first}"
    return None


def _other_field(
    path: str, first: dict[str, object], second: dict[str, object], leave: frozenset[str]
) -> str | None:
    """Return the first different field of two values, as `model.num_layers 8 instead of 4`."""
    for name in [key for key in first if key not in leave]:
        old, new = first[name], second.get(name)
        if old != new:
            plain = all(isinstance(each, int | float | str | None) for each in (old, new))
            told = f" {_told(new)} instead of {_told(old)}" if plain else ""
            return f"{path}.{name}{told}"
    return None


def _told(value: object) -> str:
    """Return a setting as the user wrote it; `unset` for None."""
    return "unset" if value is None else str(value)
