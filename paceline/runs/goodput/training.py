"""Whether runs and logs that are named together are attempts of one training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from paceline.core.errors import UserError
from paceline.core.facts import Facts
from paceline.core.units import all_done
from paceline.runs.goodput.attempt import Attempt, begun_order

OF_A_TRAINING = ("recipe", "model", "lora", "seq_len")
"""What stays the same from a training's first attempt to its last."""
OF_A_START = ("global_batch", "device", "num_devices")
"""What may be another one where an attempt goes on from a checkpoint, on other machines."""
REMEDY = "name the attempts of one training alone"


def one_training(places: Sequence[Sequence[Attempt]]) -> list[Attempt]:
    """The attempts of all runs and logs, each of which may hold several of them.

    Raises UserError where two of these are no attempts of one training: another model, recipe or
    sequence length; other devices or another batch without a checkpoint to go on from; or the first
    step once more after a training that was finished.
    """
    ordered = sorted((place for place in places if place), key=lambda each: begun_order(each[0]))
    for earlier, later in combinations(ordered, 2):
        _check(earlier[-1], later[0])
    return [attempt for place in ordered for attempt in place]


def _check(earlier: Attempt, later: Attempt) -> None:
    where = f"goodput {later.name}"
    if other := _other(earlier.facts, later.facts, OF_A_TRAINING):
        raise UserError(
            where, f"is of another training than {earlier.name}: {other}", remedy=REMEDY
        )
    if later.resumed_after:
        return
    if other := _other(earlier.facts, later.facts, OF_A_START):
        raise UserError(
            where,
            f"goes on from no checkpoint of {earlier.name}, which had another {other}",
            remedy=REMEDY,
        )
    asked = earlier.steps_asked
    if asked and len(earlier.index) and earlier.index[-1] >= asked:
        raise UserError(
            where,
            f"begins at step 1 once more, and {earlier.name} was finished: {all_done(asked)}",
            remedy=REMEDY,
        )


def _other(earlier: Facts, later: Facts, names: Sequence[str]) -> str | None:
    """The first of `names` that both tell and tell otherwise, in words; None where there is none.

    The name of a program that nobody has described says nothing: a later one may be spelled
    otherwise.
    """
    for name in names:
        first, second = getattr(earlier, name), getattr(later, name)
        described = name != "recipe" or (earlier.model and later.model)
        if not described or first is None or second is None or first == second:
            continue
        words = name.replace("num_", "number of ").replace("_", " ").replace("seq len", "seq_len")
        plain = isinstance(first, int | str)
        return f"{words} {second} instead of {first}" if plain else words
    return None
