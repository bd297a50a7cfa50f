"""Rates of links: the catalog's, a bandwidth that a description states, or what is usual."""

from __future__ import annotations

import re
from typing import NamedTuple

from paceline.core.errors import UserError
from paceline.core.hardware import Device
from paceline.estimate.model.case import Generation
from paceline.files import catalog

INTRA = {"volta": 150e9, "ampere": 300e9, "hopper": 450e9, "blackwell": 900e9}
"""NVLink 2 to 5, bytes/s of one device in one direction, where no link is named."""
INTER = {
    "volta": 12.5e9, "ampere": 25e9, "hopper": 50e9, "blackwell": 50e9, "amd": 50e9, "cdna4": 50e9
}  # fmt: skip
"""The usual network port of a device, 100 to 400 Gb/s, where none is named."""
PCIE = {"volta": "PCIe-3", "ampere": "PCIe-4", "hopper": "PCIe-5"}
"""What cards have among each other; bridges between pairs do not count."""
XGMI = ("MI300X", "MI325X", "MI350X", "MI355X")
"""Families that are linked one by one inside a node."""
OF_FAMILY = {
    **dict.fromkeys(XGMI[:2], "xGMI-MI300"), **dict.fromkeys(XGMI[2:], "xGMI-MI350"),
    "H800": "NVLink4-H800",
    "TPU-v5e": "ICI-v5e", "TPU-v5p": "ICI-v5p", "TPU-v6e": "ICI-v6e", "TPU-v7": "ICI-v7",
    "T4": "PCIe-3",
    **dict.fromkeys(("A10", "A30", "A40", "L4", "L40", "L40S"), "PCIe-4"),
    **dict.fromkeys(("RTX3090", "RTX4090", "RTXA6000", "RTX6000ADA"), "PCIe-4"),
    **dict.fromkeys(("RTX5090", "RTXPRO6000"), "PCIe-5"),
}  # fmt: skip
"""What devices of a family have inside a node, where their generation does not tell it."""
FALLBACK_LINK = 25e9
_BANDWIDTH = re.compile(
    r"(?<![\d.,])(?<!\d[eE])(?<!\d[eE][+-])"  # nothing that a number ends with
    r"(?:(?P<ports>\d+)\s*x\s*)?(?P<minus>(?<!\w)[-\u2212]\s*)?"
    r"(?P<rate>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?)"
    r"\s*(?P<scale>[GTM])(?P<unit>i?B|i?b(?:it)?)(?:\s*/\s*s|ps|it/s)?(?![a-zA-Z])"
)
LARGEST_LINK = 1e15
"""Bytes/s; the fastest of today carries a thousandth."""
_SCALES = {"M": 1e6, "G": 1e9, "T": 1e12}
_OF_NODE = re.compile(r"\bnode\b|ethernet|\d\s*GbE\b", re.IGNORECASE)
_BOTH = re.compile(r"\bbi\b|bidir|both directions", re.IGNORECASE)


class Rate(NamedTuple):
    """Bytes/s of one device in one direction."""

    bytes_per_s: float
    assumed: bool = False
    """True where nobody says which link it is."""
    note: str | None = None


def stated_bytes_per_s(text: str, per_node: int) -> float | None:
    """The bandwidth that a description states, of one device in one direction; None without any.

    "8x400 Gb/s" are the ports of a node, and so is one port of Ethernet or what is "per node";
    devices share them. Any other rate is a device's: "100 GB/s". Both directions together count
    half. Raises UserError for a rate that is negative or beyond all links.
    """
    stated = _BANDWIDTH.search(text)
    if stated is None:
        return None
    if stated["minus"]:
        raise UserError(f"link {text!r}", "states a negative rate", allowed="100 GB/s, 8x400 Gb/s")
    rate = (
        float(stated["rate"].replace(",", ""))
        * _SCALES[stated["scale"]]
        / (1 if "B" in stated["unit"] else 8)
    )
    of_node = bool(stated["ports"]) or bool(_OF_NODE.search(text))
    share = per_node if of_node else 1
    rate *= int(stated["ports"] or 1) / share / (2 if _BOTH.search(text) else 1)
    if rate > LARGEST_LINK:
        raise UserError(f"link {text!r}", f"is read as {rate / 1e9:g} GB/s", allowed="up to 1 PB/s")
    return rate or None


def intra_rate(name: str | None, device: Device, generation: Generation) -> Rate:
    """Inside a node; raises UserError for a name that is neither known nor states a rate."""
    match = _match(name, device)
    if match and match.link and match.link.bytes_per_s and match.link.kind == "intra":
        return Rate(match.link.bytes_per_s)
    stated = stated_bytes_per_s(name, 1) if name else None
    if stated and match is None:
        return Rate(stated, note=_reading(name, stated))
    card = PCIE.get(generation) if "PCIe" in device.name else None
    link = card or OF_FAMILY.get(device.family)
    usual = INTRA.get(generation, FALLBACK_LINK)
    usual = (catalog.link(link).bytes_per_s or usual) if link else usual
    note = f"links inside a node are taken as {usual / 1e9:g} GB/s"
    return Rate(usual, assumed=link is None and generation not in INTRA, note=note)


def inter_rate(name: str | None, generation: Generation, per_node: int) -> Rate:
    """Between nodes; raises UserError for a name that is neither known nor states a rate."""
    match = _match(name)
    if match and match.node_bytes_per_s:
        return Rate(match.node_bytes_per_s / per_node)
    if match and match.link and match.link.bytes_per_s and match.link.kind == "inter":
        if not match.link.name.startswith("Ethernet"):
            return Rate(match.link.bytes_per_s)
        note = f"one port of {match.link.name} is shared by the {per_node} devices of a node"
        return Rate(match.link.bytes_per_s / per_node, note=note)
    stated = stated_bytes_per_s(name, per_node) if name else None
    if stated:
        return Rate(stated, note=_reading(name, stated))
    usual = INTER.get(generation, FALLBACK_LINK)
    if match and match.link is None:
        return Rate(usual)  # no network: nothing crosses it
    return Rate(usual, True, f"the network is taken as {usual / 1e9:g} GB/s a device")


def _reading(name: str | None, bytes_per_s: float) -> str:
    return f"{name} is read as {bytes_per_s / 1e9:g} GB/s of one device in one direction"


def _match(name: str | None, device: Device | None = None) -> catalog.LinkMatch | None:
    """What the catalog knows of a name; None for one that states its own rate."""
    if not name:
        return None
    try:
        return catalog.find_link(name, device)
    except UserError as error:
        if stated_bytes_per_s(name, 1) is None:
            allowed = f"{error.allowed}, or a rate above 0: 450 GB/s, 8x400 Gb/s"
            raise UserError(error.where, error.what, allowed=allowed, remedy=error.remedy) from None
        return None
