"""Rates of catalog devices and links as the time model takes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline import catalog
from paceline.core.hardware import Device, Dtype
from paceline.errors import UserError
from paceline.estimate.case import Generation

GENERATIONS: dict[str, Generation] = {
    "V100": "volta",
    "A100": "ampere", "A800": "ampere", "A40": "ampere", "A30": "ampere",
    "H100": "hopper", "H200": "hopper", "H800": "hopper", "H20": "hopper", "GH200": "hopper",
    "B200": "blackwell", "B300": "blackwell", "GB200": "blackwell", "GB300": "blackwell",
    "cpu": "cpu",
}  # fmt: skip
"""By family of the catalog; others are `other`, with a wider prior."""
RACK = {"GB200": 72, "GB300": 72}
"""Devices in one NVLink domain where it is larger than a node (NVL72)."""
INTRA = {"volta": 150e9, "ampere": 300e9, "hopper": 450e9, "blackwell": 900e9}
"""NVLink 2 to 5, bytes/s of one device in one direction, where no link is named."""
INTER = {"volta": 12.5e9, "ampere": 25e9, "hopper": 50e9, "blackwell": 50e9}
"""The usual network port of a device, 100 to 400 Gb/s, where none is named."""
PCIE = {"volta": "PCIe-3", "ampere": "PCIe-4", "hopper": "PCIe-5"}
"""What cards have among each other; bridges between pairs do not count."""
XGMI = ("MI300X", "MI325X")
"""Families whose links inside a node the catalog states."""
FALLBACK_LINK = 25e9
_POWER = re.compile(r"(\d{3,4})\s?W\b")
NARROW: tuple[Dtype, ...] = ("fp8", "mxfp8", "nvfp4")


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
    notes: tuple[str, ...] = ()

    def peak_16bit(self) -> float:
        """Dense FLOP/s in bf16 or fp16; raises UserError when the catalog has neither."""
        peak = self.device.peak_flops_per_s("bf16") or self.device.peak_flops_per_s("fp16")
        if peak is None:
            raise UserError(self.device.name, "has no 16-bit peak in the catalog")
        return peak

    def peak_wide(self, dtype: Dtype) -> float:
        """FLOP/s of products that are not narrow: fp32's own peak in fp32, else that of 16 bit."""
        peak = self.device.peak_flops_per_s("fp32") if dtype == "fp32" else None
        return peak or self.peak_16bit()

    def peak_narrow(self, dtype: Dtype) -> float:
        """FLOP/s of a dtype narrower than 16 bit, 0 for others; raises UserError without a peak."""
        if dtype not in NARROW:
            return 0.0
        peak = self.device.peak_flops_per_s(dtype)
        if peak is None:
            raise UserError(self.device.name, f"does not compute in {dtype}",
                            allowed=", ".join(self.device.peaks))  # fmt: skip
        return peak


def machine(
    device: str, intra: str | None = None, inter: str | None = None, devices_per_node: int = 8
) -> Machine:
    """The machine that names of the catalog or of a publication stand for.

    Raises UserError for a device that the catalog does not know. Links that are not named, or whose
    rate nobody states, get the usual ones of the device's generation, with a note.
    """
    match = catalog.find_device(device)
    found, notes = match.device, [match.note] if match.note else []
    generation = GENERATIONS.get(found.family, "other")
    stated = _POWER.search(device)
    power = float(stated[1]) / found.power_w if stated and found.power_w else 1.0
    domain = RACK.get(found.family, devices_per_node)
    return Machine(
        device=found,
        generation=generation,
        domain=domain,
        devices_per_node=devices_per_node,
        intra_bytes_per_s=_intra(intra, found, generation, notes),
        inter_bytes_per_s=_inter(inter, generation, devices_per_node, notes),
        power=min(1.0, power),
        notes=tuple(notes),
    )


def _intra(name: str | None, found: Device, generation: Generation, notes: list[str]) -> float:
    match = catalog.find_link(name) if name else None
    if match and match.link and match.link.bytes_per_s and match.link.kind == "intra":
        return match.link.bytes_per_s
    usual = INTRA.get(generation, FALLBACK_LINK)
    known = PCIE.get(generation) if "PCIe" in found.name else None
    known = "xGMI-MI300" if found.family in XGMI else known
    usual = (catalog.link(known).bytes_per_s or usual) if known else usual
    notes.append(f"links inside a node are taken as {usual / 1e9:g} GB/s")
    return usual


def _inter(name: str | None, generation: Generation, per_node: int, notes: list[str]) -> float:
    match = catalog.find_link(name) if name else None
    if match and match.node_bytes_per_s:
        return match.node_bytes_per_s / per_node
    if match and match.link and match.link.bytes_per_s:
        return match.link.bytes_per_s
    usual = INTER.get(generation, FALLBACK_LINK)
    if name is None:
        notes.append(f"the network is taken as {usual / 1e9:g} GB/s a device")
    return usual
