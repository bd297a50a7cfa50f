"""What failures leave of a cluster's time: their rate, spare nodes, checkpoints."""

from __future__ import annotations

import numpy as np

from paceline.core.site import Outages
from paceline.estimate.costs import HOUR_S, Failures
from paceline.estimate.model.case import Floats

NEGLIGIBLE = 1e-12


def node_failures_per_s(outages: Outages, devices_per_node: int) -> float:
    """Of one node with its devices: 1/MTBF of the node and of each device, added up."""
    of_node = 1 / outages.node_mtbf_h if outages.node_mtbf_h else 0.0
    of_devices = devices_per_node / outages.device_mtbf_h if outages.device_mtbf_h else 0.0
    return (of_node + of_devices) / HOUR_S


def of_devices(outages: Outages, devices_per_node: int) -> Failures:
    """The same failures counted by device, with the checkpoints between them."""
    rate = node_failures_per_s(outages, devices_per_node) / devices_per_node
    return Failures(
        device_mtbf_h=1 / rate / HOUR_S,
        restart_s=outages.restart_s,
        checkpoint_s=outages.checkpoint_s,
        interval_s=outages.checkpoint_every_s,
    )


def availability(offered: Floats, spare_nodes: int) -> Floats:
    """Share of the time in which enough nodes are whole: 1 - B(spares + 1, a).

    a, `offered`, is the mean number of failed nodes, failures/s x repair time. Nodes fail while the
    training runs, so that at most spares + 1 are away: Erlang's loss formula, which holds for any
    distribution of the repair time; B(0) = 1, B(n) = a B(n - 1) / (n + a B(n - 1)).
    """
    lost = np.ones_like(offered)
    for count in range(1, spare_nodes + 2):
        lost = offered * lost / (count + offered * lost)
        if lost.max() < NEGLIGIBLE:
            break
    return 1 - lost
