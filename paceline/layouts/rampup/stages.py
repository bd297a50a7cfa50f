"""The stages of a batch ramp-up: which batch is trained for how many samples and steps in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from paceline.core.schedules import RampUp
from paceline.core.units import counted


@dataclass(frozen=True)
class Stretch:
    """Steps of one batch; None where nobody knows how many."""

    batch: int
    steps: int | None


@dataclass(frozen=True)
class RampStage:
    """What one layout trains: one batch, or those of a ramp-up up to the next stage's."""

    stretches: tuple[Stretch, ...]

    @property
    def batch(self) -> int:
        """The batch that it begins with."""
        return self.stretches[0].batch

    @property
    def batches(self) -> list[int]:
        """All its batches, the smallest first."""
        return [stretch.batch for stretch in self.stretches]

    @property
    def steps(self) -> int | None:
        """Steps of the stage."""
        counts = [stretch.steps for stretch in self.stretches]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def samples(self) -> int | None:
        """Samples of the stage, whole steps of them."""
        if self.steps is None:
            return None
        return sum(stretch.batch * (stretch.steps or 0) for stretch in self.stretches)


def doublings(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... below last, and last."""
    numbers = [first]
    while numbers[-1] * 2 < last:
        numbers.append(numbers[-1] * 2)
    return numbers if first >= last else [*numbers, last]


def given_stages(
    batches: Sequence[int], samples: Sequence[float], total_samples: float | None
) -> list[RampStage]:
    """One batch a stage, each for its own samples; one number holds for all but the last.

    Where the last stage's samples are not given it trains what remains of the total. Raises
    ValueError for another number of numbers, and for batches that do not rise.
    """
    if not _rise(batches):
        raise ValueError("must rise")
    ramp = list(samples) * (len(batches) - 1) if len(samples) == 1 else list(samples)
    if len(ramp) == len(batches) - 1:
        ramp.append(_rest(total_samples, sum(ramp)) if total_samples is not None else -1)
    if len(ramp) != len(batches):
        raise ValueError(f"{len(samples)} numbers of samples for {counted(len(batches), 'stage')}")
    return [
        RampStage((Stretch(batch, ceil(count / batch) if count >= 0 else None),))
        for batch, count in zip(batches, ramp, strict=True)
    ]


def stages_of_ramp_up(
    ramp_up: RampUp,
    global_batch: int,
    batches: Sequence[int],
    total_samples: float | None,
    every_batch: bool = False,
) -> list[RampStage]:
    """The stages of a ramp-up to `global_batch`, by their first batches.

    A stage lasts until the ramp-up has come to the next stage's batch, the last one to the end. It
    trains its own batch all the time, or with `every_batch` those of the ramp-up, each for the
    steps that it has there. Raises ValueError for batches that do not rise or lie outside the
    ramp-up.
    """
    pairs = [*ramp_up.sizes(global_batch), (None, global_batch)]
    if batches[0] < ramp_up.start or batches[-1] > global_batch or not _rise(batches):
        raise ValueError(f"must rise from {ramp_up.start} on to at most {global_batch}")
    stages: list[RampStage] = []
    behind = 0
    for number, batch in enumerate(batches):
        # What the ramp-up trains before the first stage's batch, that stage trains too.
        lower = batch if number else 0
        upper = batches[number + 1] if number + 1 < len(batches) else global_batch + 1
        ends = [(until, b) for until, b in pairs if lower <= b < upper]
        if not every_batch:
            ends = [(ends[-1][0], batch)] if ends else []
        stage = _stage(ends, behind, total_samples)
        stages.append(stage if ends else RampStage((Stretch(batch, 0),)))
        behind += stage.samples or 0
    return stages


def _rise(batches: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(batches))


def _stage(
    ends: Sequence[tuple[int | None, int]], behind: int, total_samples: float | None
) -> RampStage:
    """(until, batch) pairs in steps, with `behind` samples before them."""
    stretches: list[Stretch] = []
    for until, batch in ends:
        limits = [limit for limit in (until, total_samples) if limit is not None]
        steps = ceil(_rest(min(limits), behind) / batch) if limits else None
        behind += (steps or 0) * batch
        stretches.append(Stretch(batch, steps))
    return RampStage(tuple(stretches))


def _rest(total: float, behind: float) -> float:
    return max(0.0, total - behind)
