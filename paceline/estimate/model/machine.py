"""Rates of catalog devices and links as the time model takes them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from paceline.core.bandwidth import parse_bandwidth
from paceline.core.errors import UserError
from paceline.core.hardware import NARROW, Device, Dtype, Site
from paceline.estimate.model.case import Generation
from paceline.files import catalog

FALLBACK_LINK = 25e9


class Rate(NamedTuple):
    """Bytes/s of one device in one direction."""

    bytes_per_s: float
    assumed: bool = False
    """True if the link is not specified."""
    note: str | None = None


def intra_rate(name: str | None, device: Device) -> Rate:
    """Return the rate inside a node; raises UserError for an unknown name without a rate."""
    match = _match(name, device)
    if match and match.link and match.link.bytes_per_s and match.link.kind == "intra":
        return Rate(match.link.bytes_per_s)
    bytes_per_s = parse_bandwidth(name, 1) if name else None
    if bytes_per_s and match is None:
        return Rate(bytes_per_s, note=_reading(name, bytes_per_s))
    generation, family = catalog.generation_of(device.family)
    card = generation.pcie if "PCIe" in device.name else None
    link = card or family.link
    default = generation.intra_bytes_per_s or FALLBACK_LINK
    default = (catalog.link(link).bytes_per_s or default) if link else default
    note = f"intra-node links are assumed to have {default / 1e9:g} GB/s per device"
    return Rate(default, assumed=link is None and generation.intra_bytes_per_s is None, note=note)


def inter_rate(name: str | None, generation: Generation, per_node: int) -> Rate:
    """Return the rate between nodes; raises UserError for an unknown name without a rate."""
    match = _match(name)
    if match and match.node_bytes_per_s:
        return Rate(match.node_bytes_per_s / per_node)
    if match and match.link and match.link.bytes_per_s and match.link.kind == "inter":
        if not match.link.name.startswith("Ethernet"):
            return Rate(match.link.bytes_per_s)
        note = f"one port of {match.link.name} is shared by the {per_node} devices of a node"
        return Rate(match.link.bytes_per_s / per_node, note=note)
    bytes_per_s = parse_bandwidth(name, per_node) if name else None
    if bytes_per_s:
        return Rate(bytes_per_s, note=_reading(name, bytes_per_s))
    default = catalog.generations()[generation].inter_bytes_per_s or FALLBACK_LINK
    if match and match.link is None:
        return Rate(default)  # no network: nothing crosses it
    return Rate(default, True, f"the network is assumed to have {default / 1e9:g} GB/s per device")


def _reading(name: str | None, bytes_per_s: float) -> str:
    return f"{name} is read as {bytes_per_s / 1e9:g} GB/s per device and direction"


def _match(name: str | None, device: Device | None = None) -> catalog.LinkMatch | None:
    """Return the catalog's entry for a link; None for a name that states its own rate."""
    if not name:
        return None
    try:
        return catalog.find_link(name, device)
    except UserError as error:
        if parse_bandwidth(name, 1) is None:
            allowed = "a link of the catalog, or a rate above 0: 450 GB/s, 8x400 Gb/s"
            raise UserError(error.where, error.what, allowed=allowed, remedy=error.remedy) from None
        return None


MAX_POWER = 1.25
"""Maximum ratio of power per FLOP/s to that of the generation's usual device."""
MAX_SWITCHLESS_DEVICES = 4
"""Maximum devices per board on which A100s and H100s have no NVLink switch."""
_POWER = re.compile(r"(\d{3,4})\s?W\b")
_PROXIED = re.compile(r"\bEFA(v\d)?\b")
"""Networks whose ports devices cannot drive themselves (Mao et al., arXiv:2512.19849)."""
FOUR_BIT: tuple[Dtype, ...] = ("mxfp4", "nvfp4")


class AssumedProperties(NamedTuple):
    """Flags for properties that are not specified and therefore assumed."""

    intra: bool = False
    inter: bool = False
    device: bool = False


NOTHING_ASSUMED = AssumedProperties()


class Level(NamedTuple):
    """One level of a declared fabric."""

    name: str
    devices: float
    """Number of devices that the level connects; infinite if it connects all."""
    bytes_per_s: float
    """Bytes/s of one device's share of the level's traffic, in one direction."""
    latency_s: float = 0.0


@dataclass(frozen=True)
class Machine:
    """One kind of device and its links."""

    device: Device
    generation: Generation
    domain: int
    devices_per_node: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    power: float
    cpu_oversubscription: float = 1.0
    """Number of processes per CPU core; 1 if each has its own."""
    proxied: bool = False
    """True if CPU threads drive the network ports."""
    inter_measured: bool = False
    """True if the rate between nodes is what collectives reach, not that of the links."""
    mesh: bool = False
    """True if each device of a domain has direct links to the others, without a switch."""
    assumed_properties: AssumedProperties = NOTHING_ASSUMED
    levels: tuple[Level, ...] = ()
    """Levels of a declared fabric, from the NVLink domain outwards; empty if only domain and
    network are known."""
    scattered: bool = False
    """True if neighbouring domains may be anywhere in the network."""
    notes: tuple[str, ...] = ()

    def peak_16bit(self) -> float:
        """Return the dense FLOP/s in bf16 or fp16; raises UserError if the catalog has neither."""
        peak = self.device.peak_flops_per_s("bf16") or self.device.peak_flops_per_s("fp16")
        if peak is None:
            raise UserError(self.device.name, "has no 16-bit peak in the catalog")
        return peak

    def peak_wide(self, dtype: Dtype) -> float:
        """Return the FLOP/s of GEMMs that are not narrow: the fp32 peak for fp32, else 16-bit."""
        peak = self.device.peak_flops_per_s("fp32") if dtype == "fp32" else None
        return peak or self.peak_16bit()

    def peak_narrow(self, dtype: Dtype) -> float:
        """Return the FLOP/s of a dtype narrower than 16 bit, 0 for others.

        Raises UserError if the catalog has no peak for it.
        """
        if dtype not in NARROW:
            return 0.0
        peak = self.device.peak_flops_per_s(dtype)
        if peak is None:
            raise UserError(
                self.device.name,
                f"does not compute in {dtype}",
                allowed=", ".join(self.device.peaks),
            )
        return peak


def machine(
    device: str, intra: str | None = None, inter: str | None = None, devices_per_node: int = 8
) -> Machine:
    """Return the machine for names from the catalog or from a publication.

    Raises UserError for a device that is not in the catalog, and for an unknown link without a
    rate. Unspecified links get the default of the device's generation, with a note.
    """
    match = catalog.find_device(device)
    entry = match.device
    generation_entry, family = catalog.generation_of(entry.family)
    generation = generation_entry.name
    power_match = _POWER.search(device)
    power = float(power_match[1]) / entry.power_w if power_match and entry.power_w else 1.0
    domain = family.domain or devices_per_node
    inside = intra_rate(intra, entry)
    between = inter_rate(inter, generation, devices_per_node)
    return Machine(
        device=entry,
        generation=generation,
        domain=domain,
        devices_per_node=devices_per_node,
        intra_bytes_per_s=inside.bytes_per_s,
        inter_bytes_per_s=between.bytes_per_s,
        power=_power(entry, generation, power),
        proxied=bool(_PROXIED.search(inter or "")),
        mesh=_is_mesh(entry, generation, devices_per_node),
        assumed_properties=AssumedProperties(inside.assumed, between.assumed, not match.exact),
        notes=tuple(note for note in (match.note, inside.note, between.note) if note),
    )


def _power(device: Device, generation: Generation, limit: float) -> float:
    """Return the power per peak FLOP/s relative to the generation's usual device.

    `limit` is the power limit divided by the data sheet's power.
    """
    peak = device.peak_flops_per_s("bf16") or device.peak_flops_per_s("fp16")
    usual_watts_per_tflops = catalog.generations()[generation].watts_per_tflops
    if not (peak and device.power_w and usual_watts_per_tflops):
        return min(1.0, limit)
    return min(MAX_POWER, limit * device.power_w / (peak / 1e12) / usual_watts_per_tflops)


def _is_mesh(device: Device, generation: Generation, per_node: int) -> bool:
    """Return True if devices have direct links without a switch: V100s, and boards of four.

    NVLink has switches on A100 boards of eight and later, and in racks.
    """
    family = catalog.generation_of(device.family)[1]
    if "PCIe" in device.name or family.domain:
        return False
    boards = generation in ("ampere", "hopper") and per_node <= MAX_SWITCHLESS_DEVICES
    return family.mesh or boards


def with_fabric(machine: Machine, site: Site) -> Machine:
    """Return the machine with the site's fabric, if the site declares one.

    Traffic that crosses a level gets the minimum of the level's own rate and the one below it,
    divided by its oversubscription. Raises UserError for an unknown link without a rate.
    """
    if not site.fabric:
        return replace(machine, scattered=site.placement == "scattered")
    first, *network = site.fabric
    inside = intra_rate(first.link, machine.device)
    domain = float(first.devices or site.world_size)
    levels = [Level(first.name, first.devices or inf, inside.bytes_per_s, first.latency_s)]
    rate, network_assumed = inf, False
    default_link_note = intra_rate(None, machine.device).note
    default_network_note = inter_rate(None, machine.generation, site.devices_per_node).note
    notes = [
        note for note in machine.notes if note not in (default_link_note, default_network_note)
    ] + [inside.note]
    for place, level in enumerate(network):
        if level.link or place == 0:
            level_rate = inter_rate(level.link, machine.generation, site.devices_per_node)
            rate = min(rate, level_rate.bytes_per_s)
            network_assumed = network_assumed or level_rate.assumed
            notes.append(level_rate.note)
        rate /= level.oversubscription
        levels.append(Level(level.name, level.devices or inf, rate, level.latency_s))
    between = levels[1].bytes_per_s if network else machine.inter_bytes_per_s
    return replace(
        machine,
        domain=int(domain),
        intra_bytes_per_s=inside.bytes_per_s,
        inter_bytes_per_s=between,
        mesh=machine.mesh and domain <= site.devices_per_node,
        assumed_properties=machine.assumed_properties._replace(
            intra=inside.assumed, inter=network_assumed
        ),
        levels=tuple(levels),
        scattered=site.placement == "scattered",
        notes=tuple(note for note in notes if note),
    )
