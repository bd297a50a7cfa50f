"""Cost of a training run: days, device-hours, money, energy, carbon, and time lost to failures."""

from __future__ import annotations

from math import sqrt

from pydantic import NonNegativeFloat, PositiveFloat

from paceline.core.errors import UserError
from paceline.core.units import SECONDS_PER_DAY, percent
from paceline.core.value import Value

HOUR_S = 3600.0
KWH_J = 3.6e6
RESTART_S, CHECKPOINT_S = 600.0, 30.0
"""Default seconds of a restart and of a blocking checkpoint."""


class Failures(Value):
    """Failure rate of the devices and the time that a failure costs."""

    device_mtbf_h: PositiveFloat
    """Mean hours between failures of one device that stop the run."""
    restart_s: NonNegativeFloat = RESTART_S
    """Seconds from a failure to the first step after the restart, excluding lost work."""
    checkpoint_s: NonNegativeFloat = CHECKPOINT_S
    """Seconds for which saving a checkpoint blocks the training run."""
    interval_s: PositiveFloat | None = None
    """Seconds of training between checkpoints; None takes Young's interval."""

    def best_interval_s(self, devices: float) -> float:
        """Return the interval in seconds that loses least: sqrt(2 x checkpoint x cluster MTBF).

        It minimises the loss checkpoint / interval + interval / (2 MTBF): Young, "A first order
        approximation to the optimum checkpoint interval", CACM 17 (1974). Return 0 if checkpoints
        are free.
        """
        return sqrt(2 * self.checkpoint_s * self.device_mtbf_h * HOUR_S / devices)

    def at_best(self) -> Failures:
        """Return the same failures with Young's interval."""
        return self.model_copy(update={"interval_s": None})

    def goodput(self, devices: float) -> float:
        """Return the productive share of the time: 1 / (1 + checkpoint / interval + lost / MTBF).

        A failure loses half an interval on average plus the restart. The formula is of first order
        and is inaccurate below 0.5.
        """
        interval = self.interval_s or self.best_interval_s(devices)
        mtbf = self.device_mtbf_h * HOUR_S / devices
        saving = self.checkpoint_s / interval if self.checkpoint_s else 0.0
        return 1 / (1 + saving + (interval / 2 + self.restart_s) / mtbf)


MIN_GOODPUT = 0.01
"""Minimum goodput; the first-order formula is meaningless far above this already."""


class Prices(Value):
    """Prices of a device-hour and properties of its electricity."""

    per_device_hour: NonNegativeFloat | None = None
    """Price of a device-hour, in any currency."""
    spot_per_device_hour: NonNegativeFloat | None = None
    """Spot price of a device-hour, in the same currency."""
    currency: str = ""
    """Sign of the currency, to print amounts with."""
    pue: PositiveFloat = 1.0
    """Power usage effectiveness: energy of the site divided by that of the machines."""
    carbon_g_per_kwh: NonNegativeFloat | None = None
    """Carbon intensity of the electricity in g CO2 per kWh."""


class CheckpointPlan(Value):
    """The checkpoint interval and the resulting goodput, 0-1."""

    interval_s: float
    """The interval in seconds for which `goodput` and the cost are computed."""
    goodput: float
    """Productive share of the time at that interval, 0-1."""
    young_interval_s: float
    """The interval with the highest goodput, to first order."""
    young_goodput: float
    """Goodput at Young's interval, 0-1."""


class TrainingCost(Value):
    """Cost of a whole training run; None for unknown values."""

    total_tokens: float
    days: float
    """Duration in days, including time lost to failures."""
    device_hours: float
    """Devices times duration in hours."""
    goodput: float | None = None
    """Productive share of the time, 0-1; None if no failures are assumed."""
    checkpoints: CheckpointPlan | None = None
    """None if no failures are assumed."""
    cost: float | None = None
    """Price per device-hour times device-hours."""
    cost_per_million_tokens: float | None = None
    """Cost divided by the tokens in millions."""
    spot_cost: float | None = None
    """Spot price per device-hour times device-hours."""
    energy_kwh: float | None = None
    """Upper bound: data-sheet power of all devices times duration times PUE."""
    carbon_kg: float | None = None
    """Emissions in kg CO2, from the upper bound of the energy."""


def training_cost(
    total_tokens: float,
    tokens_per_s: float,
    devices: int,
    power_w: float | None,
    prices: Prices,
    failures: Failures | None = None,
) -> TrainingCost:
    """Return the cost of training on `total_tokens`; failures lengthen it by 1 / goodput.

    Raises UserError if failures leave almost no time for training.
    """
    plan = checkpoint_plan(failures, devices) if failures else None
    goodput = plan.goodput if plan else None
    if goodput is not None and not goodput >= MIN_GOODPUT:
        raise UserError(
            "--mtbf, --restart-time, --checkpoint-time",
            f"leave only {percent(goodput, 2)} of the time for training",
            allowed=f"values that leave {percent(MIN_GOODPUT, 0)} or more",
        )
    seconds = total_tokens / tokens_per_s / (goodput or 1.0)
    hours = devices * seconds / HOUR_S
    energy = power_w * devices * seconds * prices.pue / KWH_J if power_w else None
    carbon, cost = prices.carbon_g_per_kwh, _times(prices.per_device_hour, hours)
    return TrainingCost(
        total_tokens=total_tokens,
        days=seconds / SECONDS_PER_DAY,
        device_hours=hours,
        goodput=goodput,
        checkpoints=plan,
        cost=cost,
        cost_per_million_tokens=None if cost is None else 1e6 * cost / total_tokens,
        spot_cost=_times(prices.spot_per_device_hour, hours),
        energy_kwh=energy,
        carbon_kg=energy * carbon / 1000 if energy is not None and carbon is not None else None,
    )


def checkpoint_plan(failures: Failures, devices: int) -> CheckpointPlan:
    """Return the checkpoint interval used on `devices` devices, and Young's."""
    young_interval_s = failures.best_interval_s(devices)
    return CheckpointPlan(
        interval_s=young_interval_s if failures.interval_s is None else failures.interval_s,
        goodput=failures.goodput(devices),
        young_interval_s=young_interval_s,
        young_goodput=failures.at_best().goodput(devices),
    )


def _times(price: float | None, hours: float) -> float | None:
    return None if price is None else price * hours
