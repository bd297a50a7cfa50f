"""The cost of unequal loads of expert ranks, from the loads and times that the ranks record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from paceline.files.events import StepEvent


@dataclass(frozen=True)
class ExpertTimes:
    """Means over the steps of a run whose ranks hold different experts."""

    overload: float
    """Largest load of an expert rank over the mean load, mean over the layers."""
    experts_s: float
    """Seconds per step of the experts of a rank, mean over the ranks."""
    dispatch_s: float
    """Seconds per step of the exchanges of tokens, on the rank that waits least in them."""
    mean_dispatch_s: float
    """The same as a mean over the ranks, which includes the waits for the slowest rank."""

    @property
    def balanced_dispatch_s(self) -> float:
        """Seconds per step of the exchanges of tokens with equal loads."""
        return self.dispatch_s / self.overload

    @property
    def imbalance_s(self) -> float:
        """Seconds per step that equal loads would save.

        The time of experts and of messages is taken as proportional to their rows. All ranks wait
        for the one with o times the mean load, so experts take o x `experts_s`, and the exchange
        takes 1 / o of its time with equal loads. Ranks cannot have waited longer than they did.
        """
        exchange_s = self.dispatch_s - self.balanced_dispatch_s
        return min((self.overload - 1) * self.experts_s + exchange_s, self.mean_dispatch_s)


def expert_times(rows: Sequence[Sequence[StepEvent]]) -> ExpertTimes | None:
    """Return the times of experts over the same steps of every rank; None if any is unknown."""
    overload: list[float] = []
    experts: list[list[float]] = []
    dispatch: list[list[float]] = []
    for row in rows:
        experts.append([])
        dispatch.append([])
        for event in row:
            loads = event.routing.rank_overload if event.routing else ()
            if event.experts_s is None or event.dispatch_s is None or not loads:
                return None
            overload.append(fmean(loads))
            experts[-1].append(event.experts_s)
            dispatch[-1].append(event.dispatch_s)
    if not overload or min(overload) < 1:
        return None
    return ExpertTimes(
        overload=fmean(overload),
        experts_s=float(np.mean(experts)),
        dispatch_s=float(np.min(dispatch, axis=0).mean()),
        mean_dispatch_s=float(np.mean(dispatch)),
    )
