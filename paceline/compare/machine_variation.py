"""Run-to-run variation of a machine, estimated from runs of any configuration on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from paceline.compare.significance import VariationPrior
from paceline.core.units import pluralize
from paceline.core.value import NonNegativeInt, Value

MAX_DEGREES = 6.0
"""Maximum degrees of freedom of a machine's variation, because its configurations differ. If their
standard deviations vary by half (lognormal), 0.7% of equal pairs are beyond a 99% interval."""


class MachineVariation(Value):
    """Relative standard deviations of runs on one kind of machine, for other configurations too."""

    device: str
    """Name of the device in the catalog."""
    device_label: str | None = None
    """Name of a CPU as the machine reports it; None for other devices."""
    within: PositiveFloat
    """Between runs of one day."""
    degrees: PositiveFloat
    between: NonNegativeFloat
    """Between days, beyond that of their runs."""
    between_degrees: PositiveFloat
    n_runs: NonNegativeInt
    n_configurations: NonNegativeInt
    date: str
    """Date and time of the estimate in UTC, ISO 8601."""

    @property
    def prior(self) -> VariationPrior:
        """The variation as a prior."""
        return VariationPrior(self.within, self.degrees, self.between, self.between_degrees)

    @property
    def words(self) -> str:
        """The variation and its source, for people."""
        return (
            f"{100 * self.within:.2g}% within a day and {100 * self.between:.2g}% between days, by "
            f"{pluralize(self.n_runs, 'run')} of "
            f"{pluralize(self.n_configurations, 'configuration')} on "
            f"{self.device_label or self.device}"
        )


@dataclass(frozen=True)
class ConfigurationRuns:
    """Runs of one configuration around their level."""

    days: tuple[tuple[float, ...], ...]
    """Values of the runs of each day, relative to the level of that day."""
    num_levels: int


def estimate_prior(
    configurations: Sequence[ConfigurationRuns], published: VariationPrior
) -> VariationPrior | None:
    """Return the published prior, updated with the runs; None if they show no variation.

    One-way analysis of variance, pooled over the configurations as in `estimate_run_variation`.
    With nu degrees, a variance s^2 becomes (nu_0 s_0^2 + nu s^2) / (nu_0 + nu).
    """
    within = between = sizes = 0.0
    num_runs = num_days = num_levels = 0
    for runs in configurations:
        residuals = [np.log(day) for day in runs.days]
        counts = np.array([len(day) for day in residuals])
        means = np.array([float(day.mean()) for day in residuals])
        within += sum(float(((day - day.mean()) ** 2).sum()) for day in residuals)
        between += float((counts * means**2).sum())
        sizes += float(counts.sum() - (counts**2).sum() / counts.sum())
        num_runs, num_days = num_runs + int(counts.sum()), num_days + len(counts)
        num_levels += runs.num_levels
    degrees, between_degrees = num_runs - num_days, max(0, num_days - num_levels)
    if degrees + between_degrees < 1:
        return None
    variance = (published.degrees * published.within**2 + within) / (published.degrees + degrees)
    between_variance = published.between**2
    if between_degrees:
        excess = max(0.0, between / between_degrees - variance) * between_degrees / sizes
        between_variance = (
            published.between_degrees * between_variance + between_degrees * excess
        ) / (published.between_degrees + between_degrees)
    return VariationPrior(
        variance**0.5,
        min(published.degrees + degrees, max(published.degrees, MAX_DEGREES)),
        between_variance**0.5,
        min(
            published.between_degrees + between_degrees, max(published.between_degrees, MAX_DEGREES)
        ),
    )
