"""The levels of a cluster's stated fabric, as rates of one device."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from paceline.core.site import Site
from paceline.estimate.model.fabric import inter_rate, intra_rate
from paceline.estimate.model.machine import Level, Machine


def with_fabric(machine: Machine, site: Site) -> Machine:
    """The machine with the site's fabric, if it states one.

    What crosses a level has the least of the level's own rate and the one below it, over its
    oversubscription. Raises UserError for a link that is not known and states no rate.
    """
    if not site.fabric:
        return replace(machine, scattered=site.placement == "scattered")
    first, *network = site.fabric
    inside = intra_rate(first.link, machine.device, machine.generation)
    domain = float(first.devices or site.world_size)
    levels = [Level(first.name, first.devices or inf, inside.bytes_per_s, first.latency_s)]
    rate, assumed = inf, False
    usual = intra_rate(None, machine.device, machine.generation).note
    usual_network = inter_rate(None, machine.generation, site.devices_per_node).note
    notes = [note for note in machine.notes if note not in (usual, usual_network)] + [inside.note]
    for place, level in enumerate(network):
        if level.link or place == 0:
            own = inter_rate(level.link, machine.generation, site.devices_per_node)
            rate, assumed = min(rate, own.bytes_per_s), assumed or own.assumed
            notes.append(own.note)
        rate /= level.oversubscription
        levels.append(Level(level.name, level.devices or inf, rate, level.latency_s))
    between = levels[1].bytes_per_s if network else machine.inter_bytes_per_s
    return replace(
        machine,
        domain=int(domain),
        intra_bytes_per_s=inside.bytes_per_s,
        inter_bytes_per_s=between,
        mesh=machine.mesh and domain <= site.devices_per_node,
        assumed=machine.assumed._replace(intra=inside.assumed, inter=assumed),
        levels=tuple(levels),
        scattered=site.placement == "scattered",
        notes=tuple(note for note in notes if note),
    )
