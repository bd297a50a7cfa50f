"""Bandwidth of a link, as people write it."""

from __future__ import annotations

import re

from paceline.core.errors import UserError
from paceline.core.units import GIB, MIB

_BANDWIDTH = re.compile(
    r"(?<![\d.,])(?<!\d[eE])(?<!\d[eE][+-])"  # nothing that a number ends with
    r"(?:(?P<ports>\d{1,9})\s*[x×]\s*)?(?P<minus>(?<!\w)[-\u2212]\s*)?"
    r"(?P<rate>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?)"
    r"\s*(?P<scale>[GTM]i?)(?P<unit>[bB](?:its?)?)(?:\s*/\s*s|ps)?(?![a-zA-Z])"
)
MAX_PORTS = 1024
MAX_LINK_BYTES_PER_S = 1e15
"""Maximum plausible bytes/s of a link; today's fastest links reach a thousandth of it."""
_SCALES = {"M": 1e6, "G": 1e9, "T": 1e12, "Mi": MIB, "Gi": GIB, "Ti": 1024 * GIB}
_OTHER_FACTOR = re.compile(r"(?:(?:^|\s)[-\u2212]|\d\s*[x×]\s*)$")
"""End of a text before a rate: a sign, or a factor that is not a whole number."""
_PER_NODE = re.compile(r"\bnode\b|ethernet|\d\s*GbE\b", re.IGNORECASE)
_PCIE = re.compile(r"\bPCI", re.IGNORECASE)
_BIDIRECTIONAL = re.compile(r"\bbi\b|bidir|both directions", re.IGNORECASE)


def parse_bandwidth(text: str, per_node: int) -> float | None:
    """Return the bytes/s of one device in one direction; None if `text` contains no rate.

    "8x400 Gb/s" are the ports of a node. One port of Ethernet, or a rate "per node", also belongs
    to a node and is shared by its devices. Any other rate belongs to a device: "100 GB/s". The
    lanes of "PCIe 16x 64 GB/s" are not ports. A rate for both directions together counts half.
    Raises UserError for a rate that is negative or beyond all links.
    """
    match = _BANDWIDTH.search(text)
    if match is None:
        return None
    before = text[: match.start()]
    if match["minus"]:
        raise UserError(f"link {text!r}", "states a negative rate", allowed="100 GB/s, 8x400 Gb/s")
    ports = int(match["ports"] or 1)
    if _OTHER_FACTOR.search(before) or not 1 <= ports <= MAX_PORTS:
        allowed = f"1 to {MAX_PORTS} ports: 8x400 Gb/s"
        raise UserError(f"link {text!r}", "states no valid number of ports", allowed=allowed)
    in_bytes = match["unit"] == "B"
    rate = float(match["rate"].replace(",", "")) * _SCALES[match["scale"]] / (1 if in_bytes else 8)
    has_lanes = in_bytes and bool(_PCIE.search(text))
    ports = 1 if has_lanes else ports
    of_node = (bool(match["ports"]) and not has_lanes) or bool(_PER_NODE.search(text))
    share = per_node if of_node else 1
    rate *= ports / share / (2 if _BIDIRECTIONAL.search(text) else 1)
    if rate > MAX_LINK_BYTES_PER_S:
        raise UserError(f"link {text!r}", f"is read as {rate / 1e9:g} GB/s", allowed="up to 1 PB/s")
    return rate or None
