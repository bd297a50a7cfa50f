"""Which level of a fabric each kind of exchange of a training spans, and how fast it is there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceline.core.value import Value
from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.model.collectives import group_rate, port_rate, reached
from paceline.estimate.model.machine import Machine
from paceline.estimate.model.weights import copies, replicas


class Reach(Value):
    """One kind of exchange."""

    exchange: str
    ranks: int
    """Of a group; of a pipeline, its stages."""
    level: str
    """The outermost level that a group of them crosses."""
    bytes_per_s: float
    """That one rank reaches there by the coefficients: for groups, with what members share."""


def reaches(x: Cases, c: Mapping[str, float], machine: Machine) -> tuple[Reach, ...]:
    """Of the first case: tensor, context, expert, data parallelism, pipeline, if any.

    Ranks are placed tensor first, then context, data and pipeline.
    """
    data = copies(x)[0]
    whole = x.tp * x.cp * replicas(x) * x.pp
    groups: list[tuple[str, Floats, Floats]] = [
        ("tensor", x.tp, np.ones(x.size)),
        ("context", x.cp, x.tp),
        ("data", data, x.tp),
    ]
    found = [
        _reach(name, x, size, size * stride, group_rate(x, c, size * stride, stride), machine)
        for name, size, stride in groups
    ]
    experts = x.ep * x.tp * x.cp
    found.append(_reach("expert", x, x.ep, experts, port_rate(x, c, experts), machine))
    found.append(_reach("pipeline", x, x.pp, whole, port_rate(x, c, whole), machine))
    return tuple(each for each in found if each.ranks > 1)


def _reach(
    name: str, x: Cases, ranks: Floats, span: Floats, rate: Floats, machine: Machine
) -> Reach:
    return Reach(
        exchange=name,
        ranks=int(ranks[0]),
        level=level_name(machine, float(reached(x, span)[0])),
        bytes_per_s=float(rate[0]),
    )


def level_name(machine: Machine, span: float) -> str:
    """The level that joins so many neighbouring devices."""
    for level in machine.levels:
        if span <= level.devices:
            return level.name
    if machine.levels:
        return machine.levels[-1].name
    return "fast domain" if span <= machine.domain else "network"
