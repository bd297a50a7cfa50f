"""What a training costs: days, device hours, money, energy, carbon, and time lost to failures."""

from __future__ import annotations

from math import sqrt

from pydantic import NonNegativeFloat, PositiveFloat

from paceline.core.errors import UserError
from paceline.core.units import SECONDS_PER_DAY, percent
from paceline.core.value import Value

HOUR_S = 3600.0
KWH_J = 3.6e6
RESTART_S, CHECKPOINT_S = 600.0, 30.0
"""Defaults of failures: a restart, and a checkpoint that keeps the training waiting."""


class Failures(Value):
    """How often devices fail, and what a failure costs."""

    device_mtbf_h: PositiveFloat
    """Mean hours between failures of one device that end the run."""
    restart_s: NonNegativeFloat = RESTART_S
    """From a failure to the first step after the restart, without the lost work."""
    checkpoint_s: NonNegativeFloat = CHECKPOINT_S
    """How long saving a checkpoint keeps the training waiting."""
    interval_s: PositiveFloat | None = None
    """Of training between two checkpoints; None takes the best one."""

    def best_interval_s(self, devices: float) -> float:
        """Seconds between checkpoints that lose least: sqrt(2 x checkpoint x MTBF of the cluster).

        Where the loss checkpoint / interval + interval / (2 MTBF) is smallest: Young, "A first
        order approximation to the optimum checkpoint interval", CACM 17 (1974). 0 where one costs
        nothing.
        """
        return sqrt(2 * self.checkpoint_s * self.device_mtbf_h * HOUR_S / devices)

    def at_best(self) -> Failures:
        """The same failures with Young's interval."""
        return self.model_copy(update={"interval_s": None})

    def goodput(self, devices: float) -> float:
        """Share of the time that trains, 0-1: 1 / (1 + checkpoint / interval + lost / MTBF).

        A failure loses half an interval on average, and the restart. First order in both, so it
        says little below 0.5.
        """
        interval = self.interval_s or self.best_interval_s(devices)
        mtbf = self.device_mtbf_h * HOUR_S / devices
        saving = self.checkpoint_s / interval if self.checkpoint_s else 0.0
        return 1 / (1 + saving + (interval / 2 + self.restart_s) / mtbf)


MIN_GOODPUT = 0.01
"""Where the first-order formula has long lost its meaning."""


class Prices(Value):
    """What an hour of a device costs, and its electricity."""

    per_device_hour: NonNegativeFloat | None = None
    spot_per_device_hour: NonNegativeFloat | None = None
    pue: PositiveFloat = 1.0
    """Power usage effectiveness: a site's energy over that of its machines."""
    carbon_g_per_kwh: NonNegativeFloat | None = None


class CheckpointPlan(Value):
    """How often the state is saved, and what that leaves; goodputs are 0-1."""

    interval_s: float
    """The interval that `goodput` and the cost are computed with."""
    goodput: float
    young_interval_s: float
    """What loses least to first order."""
    young_goodput: float


class TrainingCost(Value):
    """A whole training; None where something is not known."""

    total_tokens: float
    days: float
    device_hours: float
    goodput: float | None = None
    checkpoints: CheckpointPlan | None = None
    """None without failures."""
    cost: float | None = None
    spot_cost: float | None = None
    energy_kwh: float | None = None
    """At the data sheet's power of all devices, all the time, times PUE: an upper bound."""
    carbon_kg: float | None = None


def training_cost(
    total_tokens: float,
    tokens_per_s: float,
    devices: int,
    power_w: float | None,
    prices: Prices,
    failures: Failures | None = None,
) -> TrainingCost:
    """What training `total_tokens` at a rate takes; failures stretch it by 1 / goodput.

    Raises UserError for failures that leave next to no time for training.
    """
    plan = checkpoint_plan(failures, devices) if failures else None
    goodput = plan.goodput if plan else None
    if goodput is not None and not goodput >= MIN_GOODPUT:
        raise UserError(
            "--mtbf, --restart-time, --checkpoint-time",
            f"leave {percent(goodput, 2)} of the time for training, where goodput has no meaning",
            allowed=f"failures and checkpoints that leave {percent(MIN_GOODPUT, 0)} or more",
        )
    seconds = total_tokens / tokens_per_s / (goodput or 1.0)
    hours = devices * seconds / HOUR_S
    energy = power_w * devices * seconds * prices.pue / KWH_J if power_w else None
    carbon = prices.carbon_g_per_kwh
    return TrainingCost(
        total_tokens=total_tokens,
        days=seconds / SECONDS_PER_DAY,
        device_hours=hours,
        goodput=goodput,
        checkpoints=plan,
        cost=_times(prices.per_device_hour, hours),
        spot_cost=_times(prices.spot_per_device_hour, hours),
        energy_kwh=energy,
        carbon_kg=energy * carbon / 1000 if energy is not None and carbon is not None else None,
    )


def checkpoint_plan(failures: Failures, devices: int) -> CheckpointPlan:
    """The interval between checkpoints that is taken on so many devices, beside Young's."""
    young = failures.best_interval_s(devices)
    return CheckpointPlan(
        interval_s=young if failures.interval_s is None else failures.interval_s,
        goodput=failures.goodput(devices),
        young_interval_s=young,
        young_goodput=failures.at_best().goodput(devices),
    )


def _times(price: float | None, hours: float) -> float | None:
    return None if price is None else price * hours
