"""Check that runs and logs given together are attempts of one training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from paceline.core.errors import UserError
from paceline.core.run import RunSettings
from paceline.core.units import all_steps_done, pluralize
from paceline.core.value import Value
from paceline.runs.goodput.attempt import Attempt, start_order

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
