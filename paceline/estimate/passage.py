"""A training's way through failures and prices, drawn many times.

The first of all draws has every expectation instead of a random number: the middle of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from math import inf, log
from typing import NamedTuple

import numpy as np

from paceline.core.site import Outages, PricePeriod, Site
from paceline.core.units import SECONDS_PER_DAY
from paceline.estimate.costs import HOUR_S, Failures
from paceline.estimate.fit.interval import Z80
from paceline.estimate.model.case import Floats
from paceline.estimate.outages import availability, node_failures_per_s, of_devices

DRAWS = 4000
SEED = 22
"""Fixed, so that one question has one answer."""
LEAST_WHOLE = 1e-6
LARGEST_COUNT = 1e15
"""Of failures; far beyond it numpy draws none."""


class PricedStretch(NamedTuple):
    """The training under one price; arrays have one value a draw."""

    period: PricePeriod | None
    seconds: Floats
    paid_s: Floats
    failures: Floats
    """Of nodes, without interruptions."""


@dataclass(frozen=True)
class Passage:
    """The whole training."""

    work_s: Floats
    """Without failures and checkpoints."""
    stretches: tuple[PricedStretch, ...]

    @property
    def seconds(self) -> Floats:
        """From the first step to the last."""
        return np.sum([each.seconds for each in self.stretches], axis=0)

    @property
    def failures(self) -> Floats:
        """Of nodes, how many."""
        return np.sum([each.failures for each in self.stretches], axis=0)

    def money(self, devices: int) -> Floats | None:
        """Of so many devices; None without prices."""
        if any(each.period is None for each in self.stretches):
            return None
        paid = [each.paid_s * each.period.per_device_hour for each in self.stretches if each.period]
        return np.sum(paid, axis=0) * devices / HOUR_S


def passage(work_s: float, log_sd: float, site: Site, nodes: int) -> Passage:
    """Of `work_s` seconds of steps on `nodes` nodes, whose logarithm is as unsure as `log_sd`."""
    rng = np.random.default_rng(SEED)
    work = work_s * np.exp(log_sd * _normal(rng))
    failing = _Failing.of(site.failures, site, nodes, rng) if site.failures else _NEVER
    stretches: list[PricedStretch] = []
    left = work
    for period, lasts_s in _periods(site.prices, site.start):
        needed, away, failures = failing.time(left, period, rng)
        share = np.minimum(1.0, lasts_s / np.maximum(needed, 1e-9))
        paid = share * (needed - away)
        stretches.append(PricedStretch(period, share * needed, paid, share * failures))
        left = left * (1 - share)
        if not left.any():
            break
    return Passage(work, tuple(stretches))


@dataclass(frozen=True)
class _Failing:
    """Checkpoints and failures of a cluster; the rate has one value a draw."""

    failures: Failures | None
    interval_s: float
    per_s: Floats
    share_whole: Floats

    @staticmethod
    def of(outages: Outages, site: Site, nodes: int, rng: np.random.Generator) -> _Failing:
        failures = of_devices(outages, site.devices_per_node)
        rate = nodes * node_failures_per_s(outages, site.devices_per_node)
        rates = rate * np.exp(log(outages.mtbf_within) / Z80 * _normal(rng))
        whole = np.ones(DRAWS + 1)
        if outages.repair_h is not None:
            whole = availability(rates * outages.repair_h * HOUR_S, outages.spare_nodes)
        devices = nodes * site.devices_per_node
        interval = failures.interval_s or failures.best_interval_s(devices)
        return _Failing(failures, interval, rates, whole)

    def time(
        self, work_s: Floats, period: PricePeriod | None, rng: np.random.Generator
    ) -> tuple[Floats, Floats, Floats]:
        """(seconds that the work takes under a price, those without the capacity, failures).

        work (1 + checkpoint / interval), and for every failure the restart and what was not saved,
        a part of the interval that is anywhere between none and all of it.
        """
        failures = self.failures
        saving = failures.checkpoint_s / self.interval_s if failures and self.interval_s else 0.0
        restart_s = failures.restart_s if failures else 0.0
        taken = 0.0
        if period and period.interrupted_every_h:
            taken = 1 / (period.interrupted_every_h * HOUR_S)
        lost, taken_away = _poisson(rng, work_s * self.per_s), _poisson(rng, work_s * taken)
        away = taken_away * (period.interrupted_for_h * HOUR_S if period else 0.0)
        unsaved = self.interval_s * _sum_of_uniforms(rng, lost + taken_away)
        seconds = work_s * (1 + saving) + (lost + taken_away) * restart_s + unsaved
        return seconds / np.maximum(self.share_whole, LEAST_WHOLE) + away, away, lost


_NEVER = _Failing(None, 0.0, np.zeros(DRAWS + 1), np.ones(DRAWS + 1))


def _periods(
    prices: Sequence[PricePeriod], start: date | None
) -> list[tuple[PricePeriod | None, float]]:
    """Each price from the start on, and the seconds for which it holds; the last one holds on."""
    if not prices:
        return [(None, inf)]
    ends = [period.since for period in prices[1:]]
    periods: list[tuple[PricePeriod | None, float]] = []
    begun = start
    for period, end in zip(prices, [*ends, None], strict=True):
        if end is None or begun is None:
            periods.append((period, inf))
        elif end > begun:
            periods.append((period, (end - begun).days * SECONDS_PER_DAY))
            begun = end
    return periods


def _normal(rng: np.random.Generator) -> Floats:
    return np.concatenate([[0.0], rng.standard_normal(DRAWS)])


def _poisson(rng: np.random.Generator, mean: Floats) -> Floats:
    mean = np.minimum(mean, LARGEST_COUNT)
    return np.concatenate([mean[:1], rng.poisson(mean[1:]).astype(float)])


def _sum_of_uniforms(rng: np.random.Generator, count: Floats) -> Floats:
    """Of so many numbers between 0 and 1, as a normal one of the same mean and variance."""
    return np.clip(count / 2 + np.sqrt(count / 12) * _normal(rng), 0.0, count)
