"""A whole training on a planned cluster: days, goodput, money and energy, each with its interval.

Step time, mean times between failures and the failures themselves are drawn (passage.py); what
nobody stated has no figure and is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from math import log

import numpy as np

from paceline.core.errors import UserError
from paceline.core.site import Site
from paceline.core.units import SECONDS_PER_DAY, percent
from paceline.core.value import Value
from paceline.estimate.costs import HOUR_S, KWH_J, LEAST_GOODPUT, Bill, saving_of
from paceline.estimate.fit.interval import Z80
from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.model.machine import Machine
from paceline.estimate.outages import node_failures_per_s, of_devices
from paceline.estimate.passage import Passage, passage
from paceline.estimate.reach import Reach, reaches


class Span(Value):
    """A figure; of the drawn trainings 80 % lie between low and high."""

    value: float
    low: float
    high: float


class PricedPeriod(Value):
    """What the training spends under one price, in the middle of the answer."""

    since: date | None
    terms: str
    per_device_hour: float
    days: float
    money: float


class Outlook(Value):
    """The answer; None is not known, and `unknown` says why."""

    cluster: str
    devices: int
    spare_nodes: int
    paid_devices: int
    """Those of spare nodes included."""
    reaches: tuple[Reach, ...]
    """Which level of the fabric each kind of exchange spans."""
    days: Span | None = None
    goodput: Span | None = None
    money: Span | None = None
    currency: str | None = None
    energy_kwh: Span | None = None
    carbon_kg: Span | None = None
    failures: Span | None = None
    """How many in all."""
    cluster_mtbf_h: float | None = None
    """Of the nodes that train, all together."""
    checkpoint_every_s: float | None = None
    young_interval_s: float | None = None
    periods: tuple[PricedPeriod, ...] = ()
    unknown: tuple[str, ...] = ()


def outlook(
    site: Site, machine: Machine, x: Cases, coefficients: Mapping[str, float], devices: int
) -> Outlook:
    """What a site says without a length of the training."""
    nodes, failures = devices // site.devices_per_node, site.failures
    saving = saving_of(of_devices(failures, site.devices_per_node), devices) if failures else None
    rate = nodes * node_failures_per_s(failures, site.devices_per_node) if failures else None
    return Outlook(
        cluster=site.name,
        devices=devices,
        spare_nodes=site.spare_nodes,
        paid_devices=devices + site.spare_nodes * site.devices_per_node,
        reaches=reaches(x, coefficients, machine),
        currency=site.currency,
        cluster_mtbf_h=1 / rate / HOUR_S if rate else None,
        checkpoint_every_s=saving.interval_s if saving else None,
        young_interval_s=saving.young_interval_s if saving else None,
        unknown=tuple(_unknown(site, machine)),
    )


def with_training(
    plain: Outlook, site: Site, machine: Machine, work_s: float, low_high: tuple[float, float]
) -> Outlook:
    """The outlook of `work_s` seconds of steps, of which `low_high` are the ends of 80 %.

    Raises UserError for failures that leave next to no time for training.
    """
    sd = log(low_high[1] / low_high[0]) / (2 * Z80)
    way = passage(work_s, sd, site, plain.devices // site.devices_per_node)
    goodput = way.work_s / way.seconds
    if not goodput[0] >= LEAST_GOODPUT:
        raise UserError(
            f"{site.name}: failures",
            f"leave {percent(float(goodput[0]), 2)} of the time for training, where goodput has no "
            "meaning",
            allowed=f"failures, repairs and checkpoints that leave {percent(LEAST_GOODPUT, 0)}",
        )
    watts = _power_w(site, machine, plain.devices)
    energy = None if watts is None else way.seconds * watts / KWH_J
    grams = site.power.carbon_g_per_kwh if site.power else None
    money = way.money(plain.paid_devices)
    return plain.model_copy(
        update={
            "days": _span(way.seconds / SECONDS_PER_DAY),
            "goodput": _span(goodput) if site.failures else None,
            "money": None if money is None else _span(money),
            "energy_kwh": None if energy is None else _span(energy),
            "carbon_kg": None if energy is None or grams is None else _span(energy * grams / 1000),
            "failures": _span(way.failures) if site.failures else None,
            "periods": tuple(_periods(way, plain.paid_devices)),
        }
    )


def bill_of(outlook: Outlook, site: Site, total_tokens: float) -> Bill | None:
    """The middle of the answer as the bill of any estimate; None without a length."""
    if outlook.days is None:
        return None
    saving = None
    if site.failures:
        saving = saving_of(of_devices(site.failures, site.devices_per_node), outlook.devices)
    values = {
        "cost": outlook.money,
        "goodput": outlook.goodput,
        "energy_kwh": outlook.energy_kwh,
        "carbon_kg": outlook.carbon_kg,
    }
    return Bill(
        total_tokens=total_tokens,
        days=outlook.days.value,
        device_hours=outlook.paid_devices * outlook.days.value * 24,
        checkpoints=saving,
        **{name: span.value for name, span in values.items() if span is not None},
    )


def _span(draws: Floats) -> Span:
    low, high = np.quantile(draws[1:], (0.1, 0.9)).tolist()
    middle = float(draws[0])
    return Span(value=middle, low=min(low, middle), high=max(high, middle))


def _periods(way: Passage, devices: int) -> Iterator[PricedPeriod]:
    for stretch in way.stretches:
        if stretch.period is not None and stretch.seconds[0] > 0:
            yield PricedPeriod(
                since=stretch.period.since,
                terms=stretch.period.terms,
                per_device_hour=stretch.period.per_device_hour,
                days=float(stretch.seconds[0]) / SECONDS_PER_DAY,
                money=float(stretch.paid_s[0]) / HOUR_S * stretch.period.per_device_hour * devices,
            )


def _power_w(site: Site, machine: Machine, devices: int) -> float | None:
    """Of the nodes that train, with the site's own; None where no power is known."""
    power = site.power
    of_device = (power.device_w if power else None) or machine.device.power_w
    if of_device is None:
        return None
    of_node = (power.node_w if power else None) or 0.0
    nodes = devices / site.devices_per_node
    return (devices * of_device + nodes * of_node) * (power.pue if power else 1.0)


def _unknown(site: Site, machine: Machine) -> Iterator[str]:
    """What the file leaves open, and what follows."""
    failures, power = site.failures, site.power
    if failures is None:
        yield "failures are not stated: the days are those of a training without any"
    elif failures.repair_h is None:
        yield "failures.repair_h is not stated: a failed node is taken to be replaced at once"
    if any(each.terms == "spot" and not each.interrupted_every_h for each in site.prices):
        yield "interrupted_every_h of spot is not stated: it is taken never to be interrupted"
    if not site.prices:
        yield "no price is stated, so there is no money"
    if power is None or power.device_w is None:
        yield (
            "power.device_w is not stated: energy is by the data sheet, an upper bound of devices"
            if machine.device.power_w
            else "power.device_w is not stated, and no data sheet's power is known: no energy"
        )
    if power is None or power.node_w is None:
        yield "power.node_w is not stated: the energy of hosts and network is not counted"
    if site.spare_nodes:
        yield "the power of waiting spare nodes is not counted"
    if not site.fabric:
        yield "no fabric is stated: domain and network are what is usual of the device"
